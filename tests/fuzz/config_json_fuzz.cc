// config.json and generation_config.json of any bytes: an error with a message, or a config whose sizes fit
// together.
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "base/check.h"
#include "weights/config/config.h"
#include "weights/config/quant_config.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    using namespace tessera;
    const std::string_view text(reinterpret_cast<const char*>(data), size);
    const Result<ModelConfig> config = parse_model_config(text);
    if (config.ok()) {
        check(config->num_heads % config->num_kv_heads == 0, "heads do not divide");
        check(config->num_experts_per_token <= config->num_experts, "top-k over the experts");
        check(config->first_k_dense <= config->num_layers, "more dense layers than layers");
        check(!config->eos_token_ids.empty(), "no end token");
        for (TokenId id : config->eos_token_ids) {
            check(id >= 0 && id < config->vocab_size, "an end token outside the vocabulary");
        }
    } else {
        check(!config.status().message().empty(), "an error without a message");
    }
    ModelConfig scratch;
    scratch.vocab_size = 4096;
    static_cast<void>(parse_generation_defaults(text, "generation_config.json", scratch));
    const Result<json::Value> object = parse_json_object(text, "config.json");
    if (object.ok()) {
        static_cast<void>(parse_quant_config(*object, "config.json"));
    }
    return 0;
}

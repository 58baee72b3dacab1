#include "model_configs.h"

#include <algorithm>
#include <filesystem>
#include <fmt/format.h>
#include <fstream>
#include <iterator>
#include <string_view>

#include "weights/loader.h"

namespace tessera {
namespace {

// What config.json of the published model says, of the fields that change the computation.
constexpr std::string_view kHy3 = R"({
  "architectures": ["HYV3ForCausalLM"], "model_type": "hy_v3", "hidden_act": "silu",
  "vocab_size": 120832, "hidden_size": 4096, "intermediate_size": 13312,
  "num_hidden_layers": 80, "first_k_dense_replace": 1, "num_nextn_predict_layers": 1,
  "num_attention_heads": 64, "num_key_value_heads": 8, "head_dim": 128, "qk_norm": true,
  "num_experts": 192, "num_experts_per_tok": 8, "num_shared_experts": 1,
  "moe_intermediate_size": 1536, "expert_hidden_dim": 1536,
  "moe_router_use_sigmoid": true, "moe_router_enable_expert_bias": true,
  "route_norm": true, "router_scaling_factor": 2.826,
  "enable_moe_fp32_combine": false, "enable_lm_head_fp32": true, "enable_attention_fp32_softmax": false,
  "rms_norm_eps": 1e-05, "rope_parameters": {"rope_theta": 11158840.0, "rope_type": "default"},
  "max_position_embeddings": 262144, "tie_word_embeddings": false,
  "bos_token_id": 120000, "eos_token_id": 120025, "pad_token_id": 120002
})";

}  // namespace

Result<ModelConfig> find_model_config(const std::string& name) {
    if (name == "hy3") {
        return parse_model_config(kHy3);
    }
    if (std::filesystem::is_directory(name)) {
        return load_model_config(name);
    }
    std::ifstream file(name, std::ios::binary);
    if (!file) {
        return not_found(fmt::format(
            "--model-config {}: neither 'hy3' nor a config.json or a folder that can be read", name));
    }
    return parse_model_config(std::string(std::istreambuf_iterator<char>(file), {}));
}

Result<ModelConfig> with_layers(ModelConfig config, int64_t layers) {
    if (layers < 0 || layers > config.num_layers) {
        return invalid_argument(
            fmt::format("--layers {}: the config has {} layers", layers, config.num_layers));
    }
    config.num_layers = layers > 0 ? layers : config.num_layers;
    config.first_k_dense = std::min(config.first_k_dense, config.num_layers);
    config.num_mtp_layers = 0;
    return config;
}

}  // namespace tessera

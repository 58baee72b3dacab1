#include "weights/config/quant_config.h"

#include <algorithm>
#include <array>
#include <fmt/format.h>

#include "weights/checkpoint/name_map.h"
#include "weights/config/field_reader.h"
#include "weights/model_weights.h"

namespace tessera {
namespace {

constexpr std::array<std::string_view, 7> kQuantisedSuffixes = {
    ".q_proj", ".k_proj", ".v_proj", ".o_proj", ".gate_proj", ".up_proj", ".down_proj"};

// A member that must be there with this value.
void require(FieldReader& fields, std::string_view key, const json::Value& value) {
    const json::Value* found = fields.find(key);
    if (found == nullptr || json::dump(*found) != json::dump(value)) {
        fields.fail_value(key, found == nullptr ? json::Value() : *found, json::dump(value));
    }
}
// The same, or absent.
void allow(FieldReader& fields, std::string_view key, const json::Value& value) {
    if (fields.find(key) != nullptr) {
        require(fields, key, value);
    }
}

void require_blocks(FieldReader& fields) {
    require(fields, "weight_block_size", json::Value::array({kFp8Block, kFp8Block}));
}

// The official release, and with dynamic activations two forms of other quantisers.
void check_fp8(FieldReader& fields, QuantConfig& quant) {
    const std::string scheme = fields.text({"activation_scheme"});
    quant.dynamic_inputs = scheme == "dynamic";
    if (fields.status().ok() && !quant.dynamic_inputs && scheme != "static") {
        fields.fail_value("activation_scheme", json::Value(scheme), "\"static\" or \"dynamic\"");
    }
    if (const json::Value* block = fields.find("weight_block_size")) {
        quant.fp8_blocks = true;
        require_blocks(fields);
        if (!quant.dynamic_inputs) {
            fields.fail_value("weight_block_size", *block,
                              "absent (weights in blocks have activation_scheme \"dynamic\")");
        }
    }
    allow(fields, "fmt", "e4m3");
}

// (a) of AngelSlim and other GPTQ writers.
void check_gptq(FieldReader& fields) {
    require(fields, "bits", 4);
    require(fields, "group_size", kInt4Group);
    require(fields, "sym", true);
    allow(fields, "desc_act", false);
    allow(fields, "checkpoint_format", "gptq");
}

// (b): int4 experts; what ignored_quantization_config says holds for the other projections.
void check_trt_llm(FieldReader& fields, QuantConfig& quant) {
    require(fields, "weight_group_size", kInt4Group);
    allow(fields, "kv_cache_quant_method", "fp8");
    const json::Value* others = fields.find("ignored_quantization_config");
    if (others == nullptr) {
        return;
    }
    FieldReader inner(*others, fields.file() + ": ignored_quantization_config");
    require(inner, "quant_method", "fp8");
    allow(inner, "fmt", "e4m3");
    require_blocks(inner);
    quant.fp8_blocks = true;
    if (!inner.status().ok()) {
        fields.fail(inner.status());
    }
}

void check_group(FieldReader& fields, const json::Value& group, const std::string& where) {
    const json::Value* weights = group.find("weights");
    const json::Value* inputs = group.find("input_activations");
    if (weights == nullptr || inputs == nullptr || !weights->is_object() || !inputs->is_object()) {
        fields.fail(invalid_argument(fmt::format(
            "{}: needs weights and input_activations (int4 weights with e4m3 activations)", where)));
        return;
    }
    FieldReader weight(*weights, where + ": weights");
    require(weight, "num_bits", 4);
    require(weight, "type", "int");
    require(weight, "strategy", "group");
    require(weight, "group_size", kInt4Group);
    require(weight, "symmetric", true);
    FieldReader input(*inputs, where + ": input_activations");
    require(input, "num_bits", 8);
    require(input, "type", "float");
    require(input, "strategy", "token");
    require(input, "dynamic", true);
    for (const FieldReader* reader : {&weight, &input}) {
        if (!reader->status().ok()) {
            fields.fail(reader->status());
        }
    }
}

// (d) of llm-compressor.
void check_compressed_tensors(FieldReader& fields) {
    allow(fields, "format", "pack-quantized");
    const json::Value* groups = fields.find("config_groups");
    if (groups == nullptr || !groups->is_object() || groups->members().empty()) {
        fields.fail_value("config_groups", groups == nullptr ? json::Value() : *groups,
                          "an object of groups of layers");
        return;
    }
    for (const auto& [name, group] : groups->members()) {
        check_group(fields, group, fmt::format("{}: config_groups.{}", fields.file(), name));
    }
}

// (e): ModelOpt.
void check_model_opt(FieldReader& fields) {
    require(fields, "quant_algo", "W4A8_AWQ");
    allow(fields, "group_size", kInt4Group);
    allow(fields, "kv_cache_quant_algo", "FP8");
}

void check_method(FieldReader& fields, QuantConfig& quant) {
    const std::string method = fields.text({"quant_method"});
    if (!fields.status().ok()) {
        return;
    }
    if (method == "fp8") {
        quant.fp8 = true;
        check_fp8(fields, quant);
    } else if (method == "gptq") {
        quant.int4 = Int4Checkpoint::kGptq;
        check_gptq(fields);
    } else if (method == "w4a8_awq") {
        quant.int4 = Int4Checkpoint::kTrtLlm;
        check_trt_llm(fields, quant);
    } else if (method == "compressed-tensors") {
        quant.int4 = Int4Checkpoint::kCompressedTensors;
        check_compressed_tensors(fields);
    } else if (method == "modelopt") {
        quant.int4 = Int4Checkpoint::kModelOpt;
        check_model_opt(fields);
    } else {
        fields.fail_value("quant_method", json::Value(method),
                          "\"fp8\", \"gptq\", \"w4a8_awq\", \"compressed-tensors\" or \"modelopt\"");
    }
}

void read_kv_scheme(FieldReader& fields, QuantConfig& quant) {
    const json::Value* scheme = fields.find("kv_cache_scheme");
    if (scheme == nullptr) {
        return;
    }
    quant.static_kv_scales = scheme->is_string() && scheme->as_string() == "static";
    if (!quant.static_kv_scales) {
        fields.fail_value("kv_cache_scheme", *scheme, "\"static\" or absent");
    }
}

void read_ignored(FieldReader& fields, QuantConfig& quant) {
    for (const char* key : {"ignored_layers", "modules_to_not_convert"}) {
        const json::Value* list = fields.find(key);
        if (list == nullptr) {
            continue;
        }
        const bool strings = list->is_array() && std::ranges::all_of(list->items(), &json::Value::is_string);
        if (!strings) {
            fields.fail_value(key, *list, "a list of module names");
            return;
        }
        for (const json::Value& name : list->items()) {
            quant.ignored_layers.push_back(canonical_name(name.as_string()));
        }
    }
    std::ranges::sort(quant.ignored_layers);
}

}  // namespace

bool QuantConfig::quantises(std::string_view module) const {
    if (!fp8) {
        return false;
    }
    const bool known = std::ranges::any_of(kQuantisedSuffixes,
                                           [&](std::string_view suffix) { return module.ends_with(suffix); });
    return known && !std::ranges::binary_search(ignored_layers, module, std::less<>());
}

Result<QuantConfig> parse_quant_config(const json::Value& config, const std::string& file) {
    QuantConfig quant;
    const json::Value* section = config.find("quantization_config");
    if (section == nullptr || section->is_null()) {
        return quant;
    }
    const std::string where = file + ": quantization_config";
    if (!section->is_object()) {
        return invalid_argument(
            fmt::format("{} is of type {}; it must be an object", where, json::type_name(section->type())));
    }
    FieldReader fields(*section, where);
    check_method(fields, quant);
    if (quant.fp8) {
        read_kv_scheme(fields, quant);
        read_ignored(fields, quant);
    }
    if (!fields.status().ok()) {
        return fields.status();
    }
    return quant;
}

Result<QuantConfig> parse_hf_quant_config(const json::Value& config, const std::string& file) {
    QuantConfig quant;
    const json::Value* section = config.find("quantization");
    if (section == nullptr || !section->is_object()) {
        return invalid_argument(fmt::format("{}: quantization is missing; it must be an object", file));
    }
    FieldReader fields(*section, file + ": quantization");
    quant.int4 = Int4Checkpoint::kModelOpt;
    check_model_opt(fields);
    if (!fields.status().ok()) {
        return fields.status();
    }
    return quant;
}

}  // namespace tessera

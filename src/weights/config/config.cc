#include "weights/config/config.h"

#include <algorithm>
#include <fmt/format.h>

#include "weights/checkpoint/files.h"
#include "weights/config/field_reader.h"

namespace tessera {
namespace {

// Far above any model of this kind, and low enough that products of two or three of them fit an int64.
constexpr IntegerRange kWidth = {1, 1 << 20};
constexpr IntegerRange kVocab = {1, 1 << 24};
constexpr IntegerRange kLayers = {1, 1024};
constexpr IntegerRange kHeads = {1, 4096};
constexpr IntegerRange kExperts = {1, 8192};
// A float32 position is exact up to 2^24.
constexpr IntegerRange kPositions = {1, 1 << 24};

void read_sizes(FieldReader& fields, ModelConfig& config) {
    config.vocab_size = fields.integer({"vocab_size"}, kVocab);
    config.hidden_size = fields.integer({"hidden_size"}, kWidth);
    config.intermediate_size = fields.integer({"intermediate_size"}, kWidth);
    config.moe_intermediate_size = fields.integer({"moe_intermediate_size", "expert_hidden_dim"}, kWidth);
    config.num_layers = fields.integer({"num_hidden_layers"}, kLayers);
    config.num_heads = fields.integer({"num_attention_heads"}, kHeads);
    config.num_kv_heads = fields.integer({"num_key_value_heads"}, kHeads);
    config.head_dim = fields.integer({"head_dim"}, {2, 1024});
    config.num_experts = fields.integer({"num_experts"}, kExperts);
    config.num_experts_per_token = fields.integer({"num_experts_per_tok"}, kExperts);
    config.num_shared_experts = fields.integer({"num_shared_experts"}, {1, 64});
    config.num_mtp_layers = fields.integer({"num_nextn_predict_layers"}, {0, 1});
    config.max_position_embeddings = fields.integer({"max_position_embeddings"}, kPositions);
}

void read_arithmetic(FieldReader& fields, ModelConfig& config) {
    config.rms_norm_eps = fields.number({"rms_norm_eps"}, {0, 1, false});
    config.router_scaling_factor = fields.number({"router_scaling_factor"}, {0, 1e4, false});
    config.qk_norm = fields.boolean({"qk_norm", "use_qk_norm"});
    config.route_norm = fields.boolean({"route_norm"});
    config.router_sigmoid = fields.boolean({"moe_router_use_sigmoid"});
    config.router_expert_bias = fields.boolean({"moe_router_enable_expert_bias"});
    config.moe_fp32_combine = fields.boolean({"enable_moe_fp32_combine"});
    config.lm_head_fp32 = fields.boolean({"enable_lm_head_fp32"});
    config.tie_word_embeddings = fields.boolean({"tie_word_embeddings"});
}

// The number of dense layers from mlp_layer_types, which must be "dense"... followed by "sparse"...
int64_t dense_layers(FieldReader& fields, const json::Value& types, int64_t num_layers) {
    constexpr std::string_view kRight =
        "a list of num_hidden_layers strings, \"dense\" first and then \"sparse\"";
    if (!types.is_array() || static_cast<int64_t>(types.items().size()) != num_layers) {
        fields.fail_value("mlp_layer_types", types, kRight);
        return 0;
    }
    int64_t dense = 0;
    int64_t sparse = 0;
    for (const json::Value& type : types.items()) {
        const std::string_view name = type.is_string() ? std::string_view(type.as_string()) : "";
        dense += name == "dense" && sparse == 0;
        sparse += name == "sparse";
    }
    if (dense + sparse != num_layers) {
        fields.fail_value("mlp_layer_types", types, kRight);
    }
    return dense;
}

void read_layer_types(FieldReader& fields, ModelConfig& config) {
    const json::Value* types = fields.find("mlp_layer_types");
    if (types == nullptr) {
        config.first_k_dense =
            fields.integer({"first_k_dense_replace", "mlp_layer_types"}, {0, config.num_layers});
        return;
    }
    config.first_k_dense = dense_layers(fields, *types, config.num_layers);
    if (const json::Value* first = fields.find("first_k_dense_replace");
        first != nullptr && first->as_int64() != config.first_k_dense) {
        fields.fail_value("first_k_dense_replace", *first,
                          fmt::format("{}, as mlp_layer_types says", config.first_k_dense));
    }
}

// Only plain RoPE: an absent, null or "default" type.
void check_rope_type(FieldReader& fields, const json::Value& parameters, std::string_view where) {
    if (!parameters.is_object()) {
        fields.fail_value(where, parameters, "an object");
        return;
    }
    for (const char* key : {"rope_type", "type"}) {
        const json::Value* type = parameters.find(key);
        if (type != nullptr && !type->is_null() && !(type->is_string() && type->as_string() == "default")) {
            fields.fail_value(fmt::format("{}.{}", where, key), *type,
                              "\"default\" (scaled RoPE is not part of hy_v3)");
        }
    }
}

void read_rope(FieldReader& fields, ModelConfig& config) {
    constexpr NumberRange kTheta = {1, 1e15};
    const json::Value* parameters = fields.find("rope_parameters");
    if (parameters == nullptr) {
        config.rope_theta = fields.number({"rope_theta", "rope_parameters"}, kTheta);
    } else {
        check_rope_type(fields, *parameters, "rope_parameters");
        FieldReader inner(*parameters, fields.file() + ": rope_parameters");
        config.rope_theta = inner.number({"rope_theta"}, kTheta);
        fields.fail(inner.status());
        if (const json::Value* outer = fields.find("rope_theta");
            outer != nullptr && (!outer->is_number() || outer->as_double() != config.rope_theta)) {
            fields.fail_value("rope_theta", *outer, "equal to rope_parameters.rope_theta");
        }
    }
    if (const json::Value* scaling = fields.find("rope_scaling")) {
        check_rope_type(fields, *scaling, "rope_scaling");
    }
    for (const json::Value* factor :
         {fields.find("partial_rotary_factor"),
          parameters == nullptr ? nullptr : parameters->find("partial_rotary_factor")}) {
        if (factor != nullptr && !factor->is_null() && !(factor->is_number() && factor->as_double() == 1.0)) {
            fields.fail_value("partial_rotary_factor", *factor, "1 (all of head_dim is rotated)");
        }
    }
}

// Fields that other architectures use and hy_v3 does not: present, they must have the value that changes
// nothing.
void check_absent_features(FieldReader& fields) {
    for (const char* key : {"attention_bias", "mlp_bias", "sliding_window"}) {
        const json::Value* value = fields.find(key);
        if (value != nullptr && !(value->is_bool() && !value->as_bool())) {
            fields.fail_value(key, *value, "false or absent (hy_v3 has no such thing)");
        }
    }
    for (const char* key : {"n_group", "topk_group"}) {
        const json::Value* value = fields.find(key);
        if (value != nullptr && value->as_int64() != 1) {
            fields.fail_value(key, *value, "1 or absent (hy_v3 routes over all experts at once)");
        }
    }
    const std::string activation = fields.text({"hidden_act"});
    if (activation != "silu" && fields.status().ok()) {
        fields.fail_value("hidden_act", json::Value(activation), "\"silu\"");
    }
}

void append_eos(FieldReader& fields, const json::Value& eos, ModelConfig& config) {
    const IntegerRange ids = {0, config.vocab_size - 1};
    const bool list = eos.is_array();
    const size_t count = list ? eos.items().size() : 1;
    for (size_t i = 0; i < count; ++i) {
        const std::optional<int64_t> id = integer_in(list ? eos.items()[i] : eos, ids);
        if (!id) {
            fields.fail_value("eos_token_id", eos, fmt::format("{} or a list of such", describe(ids)));
            return;
        }
        const auto token = static_cast<TokenId>(*id);
        if (std::ranges::find(config.eos_token_ids, token) == config.eos_token_ids.end()) {
            config.eos_token_ids.push_back(token);
        }
    }
}

void read_tokens(FieldReader& fields, ModelConfig& config) {
    const IntegerRange ids = {0, config.vocab_size - 1};
    config.bos_token_id = static_cast<TokenId>(fields.integer({"bos_token_id"}, ids));
    if (fields.find("pad_token_id") != nullptr) {
        config.pad_token_id = static_cast<TokenId>(fields.integer({"pad_token_id"}, {-1, ids.max}));
    }
    const json::Value* eos = fields.find("eos_token_id");
    if (eos != nullptr) {
        append_eos(fields, *eos, config);
    }
    if (config.eos_token_ids.empty()) {
        fields.fail(invalid_argument(fmt::format(
            "{}: eos_token_id is missing; it must be a token id or a list of at least one", fields.file())));
    }
}

void check_consistency(FieldReader& fields, const ModelConfig& config) {
    const auto require = [&](bool right, std::string message) {
        if (!right) {
            fields.fail(invalid_argument(fmt::format("{}: {}", fields.file(), message)));
        }
    };
    require(config.num_heads % config.num_kv_heads == 0,
            fmt::format("num_attention_heads is {}; it must be a multiple of num_key_value_heads, {}",
                        config.num_heads, config.num_kv_heads));
    require(config.head_dim % 2 == 0,
            fmt::format("head_dim is {}; it must be even (RoPE turns pairs)", config.head_dim));
    require(config.num_experts_per_token <= config.num_experts,
            fmt::format("num_experts_per_tok is {}; it must be at most num_experts, {}",
                        config.num_experts_per_token, config.num_experts));
    require(config.qk_norm, "qk_norm is false; hy_v3 normalises q and k, so it must be true");
    require(config.router_sigmoid,
            "moe_router_use_sigmoid is false; hy_v3 scores experts with a sigmoid, so it must be true");
}

}  // namespace

Result<json::Value> parse_json_object(std::string_view text, const std::string& file) {
    Result<json::Value> parsed = json::parse(text, {.bytes_max = kConfigBytesMax});
    if (!parsed.ok()) {
        return invalid_argument(fmt::format("{}: {}", file, parsed.status().message()));
    }
    if (!parsed->is_object()) {
        return invalid_argument(fmt::format("{}: the document is of type {}; it must be an object", file,
                                            json::type_name(parsed->type())));
    }
    return parsed;
}

Result<ModelConfig> model_config_from_json(const json::Value& object, const std::string& file) {
    FieldReader fields(object, file);
    ModelConfig config;
    config.model_type = fields.text({"model_type"});
    if (fields.status().ok() && config.model_type != "hy_v3") {
        fields.fail_value("model_type", json::Value(config.model_type),
                          "\"hy_v3\", the one architecture served");
    }
    if (!fields.status().ok()) {
        return fields.status();
    }
    read_sizes(fields, config);
    read_arithmetic(fields, config);
    read_layer_types(fields, config);
    read_rope(fields, config);
    check_absent_features(fields);
    read_tokens(fields, config);
    if (fields.status().ok()) {
        check_consistency(fields, config);
    }
    if (!fields.status().ok()) {
        return fields.status();
    }
    return config;
}

Result<ModelConfig> parse_model_config(std::string_view json_text) {
    const Result<json::Value> object = parse_json_object(json_text, "config.json");
    return object.ok() ? model_config_from_json(*object, "config.json")
                       : Result<ModelConfig>(object.status());
}

Result<ModelConfig> load_model_config(const std::string& folder) {
    if (Status status = check_model_folder(folder); !status.ok()) {
        return status;
    }
    const std::string file = join_path(folder, "config.json");
    const Result<std::string> text = read_text_file(file, kConfigBytesMax);
    if (!text.ok()) {
        return text.status();
    }
    const Result<json::Value> object = parse_json_object(*text, file);
    return object.ok() ? model_config_from_json(*object, file) : Result<ModelConfig>(object.status());
}

Result<GenerationDefaults> parse_generation_defaults(std::string_view text, const std::string& file,
                                                     ModelConfig& config) {
    const Result<json::Value> object = parse_json_object(text, file);
    if (!object.ok()) {
        return object.status();
    }
    FieldReader fields(*object, file);
    GenerationDefaults defaults;
    const auto number = [&](const char* key, NumberRange range, double& value) {
        if (fields.find(key) != nullptr) {
            value = fields.number({key}, range);
        }
    };
    number("temperature", {0, 2}, defaults.temperature);
    number("top_p", {0, 1, false}, defaults.top_p);
    number("min_p", {0, 1}, defaults.min_p);
    number("repetition_penalty", {0, 2, false}, defaults.repetition_penalty);
    if (fields.find("top_k") != nullptr) {
        // -1 and 0 both mean off.
        defaults.top_k =
            static_cast<int32_t>(std::max<int64_t>(0, fields.integer({"top_k"}, {-1, INT32_MAX})));
    }
    if (const json::Value* eos = fields.find("eos_token_id")) {
        append_eos(fields, *eos, config);
    }
    if (!fields.status().ok()) {
        return fields.status();
    }
    return defaults;
}

Result<GenerationDefaults> load_generation_defaults(const std::string& folder, ModelConfig& config) {
    const std::string file = join_path(folder, "generation_config.json");
    const Result<std::string> text = read_text_file(file, kConfigBytesMax);
    if (!text.ok()) {
        if (text.status().code() == StatusCode::kNotFound) {
            return GenerationDefaults{};
        }
        return text.status();
    }
    return parse_generation_defaults(*text, file, config);
}

}  // namespace tessera

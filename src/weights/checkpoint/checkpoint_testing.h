// For tests: writes model folders, right and wrong, into a temporary directory.
#pragma once

#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <gtest/gtest.h>
#include <map>
#include <string>
#include <vector>

#include "base/json.h"

namespace tessera::testing {

// A directory of its own, removed with everything in it.
class TempFolder {
  public:
    TempFolder() {
        std::string pattern = (std::filesystem::temp_directory_path() / "tessera_test_XXXXXX").string();
        EXPECT_NE(::mkdtemp(pattern.data()), nullptr);
        path_ = pattern;
    }
    ~TempFolder() {
        std::error_code error;
        std::filesystem::remove_all(path_, error);
    }
    TempFolder(const TempFolder&) = delete;
    TempFolder& operator=(const TempFolder&) = delete;

    const std::string& path() const { return path_; }
    std::string file(const std::string& name) const { return path_ + "/" + name; }
    void write(const std::string& name, std::string_view bytes) const {
        std::ofstream out(file(name), std::ios::binary);
        out.write(bytes.data(), static_cast<std::streamsize>(bytes.size()));
        EXPECT_TRUE(out.good());
    }

  private:
    std::string path_;
};

struct TestTensor {
    std::string dtype;
    std::vector<int64_t> shape;
    std::string bytes;
};
using TestTensors = std::map<std::string, TestTensor>;

// The file of a header that is given as text, and of the bytes that follow it.
inline std::string safetensors_file(std::string_view header, std::string_view data) {
    const uint64_t length = header.size();
    std::string out(8, '\0');
    std::memcpy(out.data(), &length, 8);
    return out.append(header).append(data);
}

// Pads the header to a multiple of `alignment` bytes, as writers do.
inline std::string safetensors_file(const TestTensors& tensors, size_t alignment = 8) {
    json::Value header = json::Value::object();
    header.set("__metadata__", json::Value::object({{"format", json::Value("pt")}}));
    std::string data;
    for (const auto& [name, tensor] : tensors) {
        json::Value entry = json::Value::object();
        entry.set("dtype", json::Value(tensor.dtype));
        json::Value shape = json::Value::array();
        for (int64_t extent : tensor.shape) {
            shape.push_back(json::Value(extent));
        }
        entry.set("shape", shape);
        const auto begin = static_cast<int64_t>(data.size());
        data += tensor.bytes;
        entry.set("data_offsets",
                  json::Value::array({json::Value(begin), json::Value(static_cast<int64_t>(data.size()))}));
        header.set(name, entry);
    }
    std::string text = json::dump(header);
    while (text.size() % alignment != 0) {
        text += ' ';
    }
    return safetensors_file(text, data);
}

inline std::string float_bytes(const std::vector<float>& values) {
    return {reinterpret_cast<const char*>(values.data()), values.size() * sizeof(float)};
}

// A bfloat16 tensor of small numbers that differ from tensor to tensor and from place to place.
inline TestTensor bfloat16_tensor(const std::string& name, std::vector<int64_t> shape) {
    size_t elements = 1;
    for (int64_t extent : shape) {
        elements *= static_cast<size_t>(extent);
    }
    std::string bytes(2 * elements, '\0');
    auto state = static_cast<uint32_t>(std::hash<std::string>{}(name));
    for (size_t i = 0; i < elements; ++i) {
        state = state * 1664525U + 1013904223U;
        const auto value = static_cast<uint16_t>(0x3C00U + (state >> 24));
        std::memcpy(bytes.data() + 2 * i, &value, 2);
    }
    return {"BF16", std::move(shape), std::move(bytes)};
}

inline TestTensor scalar_tensor(float value) {
    return {"F32", {1}, float_bytes({value})};
}

// A model of 2 layers (one dense, one with 3 experts) and an MTP layer.
inline std::string tiny_config() {
    return R"({
  "architectures": ["HYV3ForCausalLM"], "model_type": "hy_v3", "vocab_size": 32, "hidden_size": 8,
  "intermediate_size": 12, "moe_intermediate_size": 4, "expert_hidden_dim": 4, "num_hidden_layers": 2,
  "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 4, "num_experts": 3, "num_experts_per_tok": 2,
  "num_shared_experts": 1, "first_k_dense_replace": 1, "num_nextn_predict_layers": 1, "hidden_act": "silu",
  "qk_norm": true, "rms_norm_eps": 1e-05, "rope_parameters": {"rope_theta": 11158840.0, "rope_type": "default"},
  "max_position_embeddings": 128, "moe_router_use_sigmoid": true, "moe_router_enable_expert_bias": true,
  "route_norm": true, "router_scaling_factor": 2.826, "enable_moe_fp32_combine": false,
  "enable_lm_head_fp32": true, "tie_word_embeddings": false, "bos_token_id": 1, "eos_token_id": 2,
  "pad_token_id": 0})";
}

// tiny_config() with one member replaced, or removed when value is null text.
inline std::string tiny_config_with(const std::string& key, const std::string& value_json) {
    json::Value config = *json::parse(tiny_config());
    config.set(key, *json::parse(value_json));
    return json::dump(config);
}

inline void add_mlp(TestTensors& tensors, const std::string& prefix, int64_t width) {
    for (const char* part : {"gate_proj.weight", "up_proj.weight"}) {
        tensors[prefix + part] = bfloat16_tensor(prefix + part, {width, 8});
    }
    tensors[prefix + "down_proj.weight"] = bfloat16_tensor(prefix + "down_proj.weight", {8, width});
}

// All tensors of tiny_config() in the published layout.
inline TestTensors tiny_tensors() {
    TestTensors tensors;
    const auto add = [&](const std::string& name, std::vector<int64_t> shape) {
        tensors[name] = bfloat16_tensor(name, std::move(shape));
    };
    add("model.embed_tokens.weight", {32, 8});
    add("lm_head.weight", {32, 8});
    add("model.norm.weight", {8});
    for (int layer = 0; layer < 3; ++layer) {
        const std::string prefix = "model.layers." + std::to_string(layer) + ".";
        add(prefix + "input_layernorm.weight", {8});
        add(prefix + "post_attention_layernorm.weight", {8});
        add(prefix + "self_attn.q_proj.weight", {16, 8});
        add(prefix + "self_attn.k_proj.weight", {8, 8});
        add(prefix + "self_attn.v_proj.weight", {8, 8});
        add(prefix + "self_attn.o_proj.weight", {8, 16});
        add(prefix + "self_attn.q_norm.weight", {4});
        add(prefix + "self_attn.k_norm.weight", {4});
        if (layer == 0) {
            add_mlp(tensors, prefix + "mlp.", 12);
            continue;
        }
        add(prefix + "mlp.router.gate.weight", {3, 8});
        tensors[prefix + "mlp.expert_bias"] = {"F32", {3}, float_bytes({0.5F, -0.25F, 2.0F})};
        add_mlp(tensors, prefix + "mlp.shared_mlp.", 4);
        for (int expert = 0; expert < 3; ++expert) {
            add_mlp(tensors, prefix + "mlp.experts." + std::to_string(expert) + ".", 4);
        }
    }
    for (const char* name : {"enorm", "hnorm", "final_layernorm"}) {
        add(std::string("model.layers.2.") + name + ".weight", {8});
    }
    add("model.layers.2.eh_proj.weight", {8, 16});
    return tensors;
}

// The FP8 form of tiny_tensors(): every projection e4m3 with its two scales, and KV scales in their published
// spelling.
inline TestTensors tiny_fp8_tensors() {
    TestTensors tensors;
    for (auto& [name, tensor] : tiny_tensors()) {
        if (!name.ends_with("_proj.weight") || name.ends_with("eh_proj.weight")) {
            tensors[name] = tensor;
            continue;
        }
        TestTensor packed{"F8_E4M3", tensor.shape, std::string(tensor.bytes.size() / 2, '\x38')};
        tensors[name] = packed;
        const std::string module = name.substr(0, name.size() - std::strlen(".weight"));
        tensors[module + ".weight_scale"] = scalar_tensor(0.25F);
        tensors[module + ".input_scale"] = scalar_tensor(0.5F);
    }
    for (int layer = 0; layer < 3; ++layer) {
        const std::string prefix = "model.layers." + std::to_string(layer) + ".self_attn.";
        tensors[prefix + "k_cache.scale"] = scalar_tensor(2.0F);
        tensors[prefix + "v_cache.scale"] = scalar_tensor(3.0F);
    }
    return tensors;
}

inline constexpr const char* kFp8Section = R"({"quant_method": "fp8", "activation_scheme": "static",
  "ignored_layers": ["lm_head", "model.embed_tokens"], "kv_cache_scheme": "static"})";

}  // namespace tessera::testing

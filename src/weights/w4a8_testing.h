// For tests: a small model whose routed experts are int4, in each form that is loaded.
#pragma once

#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "weights/checkpoint/sized_model_testing.h"
#include "weights/int4_weights.h"
#include "weights/loader.h"
#include "weights/w4a8_export.h"

namespace tessera::w4a8_testing {

using testing::scalar_tensor;
using testing::TempFolder;
using testing::TestTensor;
using testing::TestTensors;

inline constexpr testing::Sizes kSizes{.hidden = 256, .width = 128};

inline TestTensors float_tensors() {
    return testing::sized_tensors(kSizes);
}

inline Result<LoadedModel> load(const TempFolder& folder, const std::string& section,
                                const TestTensors& tensors) {
    folder.write("config.json", testing::sized_config(kSizes, section));
    folder.write("model.safetensors", testing::safetensors_file(tensors));
    return load_model(folder.path());
}

// One expert projection as int4_rows() reads it.
struct Read {
    explicit Read(const LinearWeights& linear) : rows(linear.weight.rows), cols(linear.weight.cols) {
        codes.resize(static_cast<size_t>(rows * cols / 2));
        scales.resize(static_cast<size_t>(rows * cols / kInt4Group));
        // In two pieces: a part of the rows is what backends ask for.
        const int64_t first = 24;
        int4_rows({&linear, 0, first, codes.data(), scales.data()});
        int4_rows({&linear, first, rows - first, codes.data() + first * cols / 2,
                   scales.data() + first * cols / kInt4Group});
    }
    int code(int64_t row, int64_t k) const {
        const int nibble = codes[static_cast<size_t>(row * cols + k) / 2] >> k % 2 * 4 & 15;
        return nibble < 8 ? nibble : nibble - 16;
    }
    int64_t rows, cols;
    std::vector<uint8_t> codes;
    std::vector<uint16_t> scales;
};

inline std::vector<std::pair<std::string, const LinearWeights*>> expert_linears(const ModelWeights& weights) {
    std::vector<std::pair<std::string, const LinearWeights*>> out;
    const auto add = [&](const LayerWeights& layer, size_t index) {
        for (size_t e = 0; layer.moe && e < layer.moe->experts.size(); ++e) {
            const MlpWeights& expert = layer.moe->experts[e];
            const std::string prefix =
                "model.layers." + std::to_string(index) + ".mlp.experts." + std::to_string(e) + ".";
            out.emplace_back(prefix + "gate_proj", &expert.gate);
            out.emplace_back(prefix + "up_proj", &expert.up);
            out.emplace_back(prefix + "down_proj", &expert.down);
        }
    };
    for (size_t i = 0; i < weights.layers.size(); ++i) {
        add(weights.layers[i], i);
    }
    add(weights.mtp->layer, weights.layers.size());
    return out;
}

struct Exported {
    Exported() : pool(2) {
        Result<LoadedModel> loaded = load(source_folder, "", float_tensors());
        EXPECT_TRUE(loaded.ok()) << loaded.status().message();
        source.emplace(loaded.take());
        const Status status = export_w4a8(*source, {.shard_bytes_max = 50000}, parent.file("out"), pool);
        EXPECT_TRUE(status.ok()) << status.message();
        Result<LoadedModel> again = load_model(parent.file("out"));
        EXPECT_TRUE(again.ok()) << again.status().message();
        model.emplace(again.take());
    }
    ThreadPool pool;
    TempFolder source_folder, parent;
    std::optional<LoadedModel> source, model;
};

inline std::string words(const std::vector<uint8_t>& bytes) {
    return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}
inline std::string words(const std::vector<uint16_t>& values) {
    return {reinterpret_cast<const char*>(values.data()), values.size() * 2};
}

// kPackedSigned: as some versions of llm-compressor wrote it.
enum class Form { kGptq, kTrtLlm, kPacked, kPackedSigned, kModelOpt };

inline void add_int4(TestTensors& tensors, const std::string& module, const Read& read, Form form) {
    const int64_t n = read.rows;
    const int64_t k = read.cols;
    const TestTensor scales{"BF16", {n, k / 128}, words(read.scales)};
    std::vector<uint8_t> bytes = read.codes;
    if (form == Form::kTrtLlm) {
        tensors[module + ".qweight"] = {"I8", {n, k / 2}, words(bytes)};
        tensors[module + ".weight_scale.int4"] = scales;
        tensors[module + ".weight_scale"] = {"BF16", {}, std::string(2, '\x3C')};
        tensors[module + ".input_scale"] = scalar_tensor(1);
    } else if (form == Form::kPacked || form == Form::kPackedSigned) {
        for (uint8_t& byte : bytes) {
            byte = static_cast<uint8_t>(byte ^ (form == Form::kPacked ? 0x88 : 0));
        }
        const int64_t shape[2] = {n, k};
        tensors[module + ".weight_packed"] = {"I32", {n, k / 8}, words(bytes)};
        tensors[module + ".weight_scale"] = scales;
        tensors[module + ".weight_shape"] = {"I64", {2}, {reinterpret_cast<const char*>(shape), 16}};
    } else if (form == Form::kModelOpt) {
        std::vector<uint8_t> pairs(static_cast<size_t>(n / 2 * k));
        for (int64_t i = 0; i < n / 2 * k; ++i) {
            const int low = read.code(i / k * 2, i % k) & 15;
            pairs[static_cast<size_t>(i)] =
                static_cast<uint8_t>(low | (read.code(i / k * 2 + 1, i % k) & 15) << 4);
        }
        tensors[module + ".weight"] = {"U8", {n / 2, k}, words(pairs)};
        tensors[module + ".weight_scale"] = scales;
        tensors[module + ".weight_scale_2"] = scalar_tensor(1);
        tensors[module + ".input_scale"] = scalar_tensor(1);
    } else {
        std::vector<uint8_t> down(static_cast<size_t>(k / 8 * n * 4));
        std::vector<uint16_t> turned(read.scales.size());
        for (int64_t row = 0; row < n; ++row) {
            for (int64_t i = 0; i < k; ++i) {
                auto& byte = down[static_cast<size_t>((i / 8 * n + row) * 4 + i % 8 / 2)];
                byte = static_cast<uint8_t>(byte | (read.code(row, i) + 8) << i % 2 * 4);
            }
            for (int64_t g = 0; g < k / 128; ++g) {
                turned[static_cast<size_t>(g * n + row)] =
                    read.scales[static_cast<size_t>(row * (k / 128) + g)];
            }
        }
        tensors[module + ".qweight"] = {"I32", {k / 8, n}, words(down)};
        tensors[module + ".scales"] = {"BF16", {k / 128, n}, words(turned)};
        tensors[module + ".qzeros"] = {
            "I32", {k / 128, n / 8}, std::string(static_cast<size_t>(k / 128 * n / 2), '\x77')};
    }
}

inline constexpr const char* kGptqSection =
    R"({"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": true, "desc_act": false,
        "static_groups": true, "true_sequential": true, "checkpoint_format": "gptq"})";
inline constexpr const char* kTrtLlmSection =
    R"({"quant_method": "w4a8_awq", "weight_group_size": 128, "activation_scheme": "static",
        "kv_cache_quant_method": "fp8", "ignored_layers": ["lm_head"],
        "ignored_quantization_config": {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3",
                                        "weight_block_size": [128, 128]}})";
inline constexpr const char* kPackedSection =
    R"({"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"group_0": {
        "targets": ["Linear"],
        "weights": {"num_bits": 4, "type": "int", "symmetric": true, "strategy": "group", "group_size": 128},
        "input_activations": {"num_bits": 8, "type": "float", "symmetric": true, "strategy": "token",
                              "dynamic": true}}}})";
inline constexpr const char* kModelOptSection =
    R"({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ", "group_size": 128})";

inline const char* section_of(Form form) {
    switch (form) {
        case Form::kGptq:
            return kGptqSection;
        case Form::kTrtLlm:
            return kTrtLlmSection;
        case Form::kModelOpt:
            return kModelOptSection;
        default:
            return kPackedSection;
    }
}

inline TestTensors int4_tensors(const Exported& exported, Form form) {
    TestTensors tensors = float_tensors();
    for (const auto& [module, linear] : expert_linears(exported.model->weights)) {
        tensors.erase(module + ".weight");
        add_int4(tensors, module, Read(*linear), form);
    }
    return tensors;
}

}  // namespace tessera::w4a8_testing

// int4 experts: what is exported, and the four forms that are loaded.
#include <cmath>
#include <cstring>
#include <filesystem>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "weights/bind/float_convert.h"
#include "weights/checkpoint/checkpoint_testing.h"
#include "weights/checkpoint/sized_model_testing.h"
#include "weights/int4_weights.h"
#include "weights/loader.h"
#include "weights/w4a8_export.h"

namespace tessera {
namespace {

using testing::bfloat16_tensor;
using ::testing::HasSubstr;
using testing::safetensors_file;
using testing::TempFolder;
using testing::TestTensor;
using testing::TestTensors;

constexpr testing::Sizes kSizes{.hidden = 256, .width = 128};

TestTensors float_tensors() {
    return testing::sized_tensors(kSizes);
}

Result<LoadedModel> load(const TempFolder& folder, const std::string& section, const TestTensors& tensors) {
    folder.write("config.json", testing::sized_config(kSizes, section));
    folder.write("model.safetensors", safetensors_file(tensors));
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

std::vector<std::pair<std::string, const LinearWeights*>> expert_linears(const ModelWeights& weights) {
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

float source_value(const LinearWeights& linear, int64_t row, int64_t k) {
    uint16_t bits = 0;
    std::memcpy(&bits, static_cast<const std::byte*>(linear.weight.data) + (row * linear.weight.cols + k) * 2,
                2);
    return float_from_bfloat16(bits);
}

TEST(W4a8, exported_weights_are_the_nearest_codes) {
    const Exported out;
    const auto from = expert_linears(out.source->weights);
    const auto got = expert_linears(out.model->weights);
    ASSERT_EQ(got.size(), 2 * 3 * 3U);
    for (size_t i = 0; i < got.size(); ++i) {
        ASSERT_TRUE(got[i].second->int4.has_value()) << got[i].first;
        const Read read(*got[i].second);
        for (int64_t row = 0; row < read.rows; ++row) {
            for (int64_t k = 0; k < read.cols; ++k) {
                const float scale =
                    float_from_bfloat16(read.scales[static_cast<size_t>((row * read.cols + k) / kInt4Group)]);
                const float value = source_value(*from[i].second, row, k);
                const float code = std::fmin(7.0F, std::fmax(-8.0F, value / scale));
                ASSERT_LE(std::fabs(static_cast<float>(read.code(row, k)) - code), 0.5001F);
            }
        }
    }
    // The largest magnitude of a group is 8 steps, but for the scale's rounding.
    const Read first(*got[0].second);
    float largest = 0;
    for (int64_t k = 0; k < kInt4Group; ++k) {
        largest = std::fmax(largest, std::fabs(source_value(*from[0].second, 0, k)));
    }
    EXPECT_NEAR(float_from_bfloat16(first.scales[0]) * 8 / largest, 1, 1.0 / 256);
    // What stays as it is.
    const WeightView& shared = out.model->weights.layers[1].moe->shared.up.weight;
    EXPECT_EQ(shared.dtype, DType::kBFloat16);
    EXPECT_EQ(std::memcmp(shared.data, out.source->weights.layers[1].moe->shared.up.weight.data,
                          static_cast<size_t>(shared.rows * shared.cols * 2)),
              0);
    EXPECT_FALSE(out.model->weights.kv_scales_static);
}

std::string words(const std::vector<uint8_t>& bytes) {
    return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}
std::string words(const std::vector<uint16_t>& values) {
    return {reinterpret_cast<const char*>(values.data()), values.size() * 2};
}

enum class Form { kGptq, kTrtLlm, kPacked, kPackedSigned, kModelOpt };

void add_int4(TestTensors& tensors, const std::string& module, const Read& read, Form form) {
    const int64_t n = read.rows;
    const int64_t k = read.cols;
    const TestTensor scales{"BF16", {n, k / 128}, words(read.scales)};
    std::vector<uint8_t> bytes = read.codes;
    if (form == Form::kTrtLlm) {
        tensors[module + ".qweight"] = {"I8", {n, k / 2}, words(bytes)};
        tensors[module + ".weight_scale.int4"] = scales;
        tensors[module + ".weight_scale"] = {"BF16", {}, std::string(2, '\x3C')};
        tensors[module + ".input_scale"] = testing::scalar_tensor(1);
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
        tensors[module + ".weight_scale_2"] = testing::scalar_tensor(1);
        tensors[module + ".input_scale"] = testing::scalar_tensor(1);
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

constexpr const char* kGptqSection =
    R"({"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": true, "desc_act": false,
        "static_groups": true, "true_sequential": true, "checkpoint_format": "gptq"})";
constexpr const char* kTrtLlmSection =
    R"({"quant_method": "w4a8_awq", "weight_group_size": 128, "activation_scheme": "static",
        "kv_cache_quant_method": "fp8", "ignored_layers": ["lm_head"],
        "ignored_quantization_config": {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3",
                                        "weight_block_size": [128, 128]}})";
constexpr const char* kPackedSection =
    R"({"quant_method": "compressed-tensors", "format": "pack-quantized", "config_groups": {"group_0": {
        "targets": ["Linear"],
        "weights": {"num_bits": 4, "type": "int", "symmetric": true, "strategy": "group", "group_size": 128},
        "input_activations": {"num_bits": 8, "type": "float", "symmetric": true, "strategy": "token",
                              "dynamic": true}}}})";
constexpr const char* kModelOptSection =
    R"({"quant_method": "modelopt", "quant_algo": "W4A8_AWQ", "group_size": 128})";

const char* section_of(Form form) {
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

TestTensors int4_tensors(const Exported& exported, Form form) {
    TestTensors tensors = float_tensors();
    for (const auto& [module, linear] : expert_linears(exported.model->weights)) {
        tensors.erase(module + ".weight");
        add_int4(tensors, module, Read(*linear), form);
    }
    return tensors;
}

TEST(W4a8, the_four_forms_are_one_in_memory) {
    const Exported exported;
    const auto want = expert_linears(exported.model->weights);
    for (const Form form :
         {Form::kGptq, Form::kTrtLlm, Form::kPacked, Form::kPackedSigned, Form::kModelOpt}) {
        const TempFolder folder;
        const Result<LoadedModel> model = load(folder, section_of(form), int4_tensors(exported, form));
        ASSERT_TRUE(model.ok()) << model.status().message();
        const auto got = expert_linears(model->weights);
        for (size_t i = 0; i < got.size(); ++i) {
            ASSERT_TRUE(got[i].second->int4.has_value()) << got[i].first;
            const Read a(*got[i].second);
            const Read b(*want[i].second);
            EXPECT_EQ(a.codes, b.codes) << static_cast<int>(form) << got[i].first;
            EXPECT_EQ(a.scales, b.scales) << static_cast<int>(form) << got[i].first;
        }
    }
}

TEST(W4a8, model_opt_says_it_beside_config_json) {
    const Exported exported;
    const TempFolder folder;
    folder.write("hf_quant_config.json",
                 R"({"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "W4A8_AWQ",
                     "kv_cache_quant_algo": "FP8", "group_size": 128, "exclude_modules": ["lm_head"]}})");
    const Result<LoadedModel> model = load(folder, "", int4_tensors(exported, Form::kModelOpt));
    ASSERT_TRUE(model.ok()) << model.status().message();
    folder.write("hf_quant_config.json", R"({"quantization": {"quant_algo": "NVFP4"}})");
    EXPECT_THAT(load_model(folder.path()).status().message(),
                HasSubstr("hf_quant_config.json: quantization"));
}

TEST(W4a8, an_expert_may_have_stayed_bfloat16) {
    const Exported exported;
    TestTensors tensors = int4_tensors(exported, Form::kGptq);
    const std::string module = "model.layers.1.mlp.experts.2.up_proj";
    for (const char* part : {".qweight", ".scales", ".qzeros"}) {
        tensors.erase(module + part);
    }
    tensors[module + ".weight"] = float_tensors()[module + ".weight"];
    const TempFolder folder;
    const Result<LoadedModel> model = load(folder, kGptqSection, tensors);
    ASSERT_TRUE(model.ok()) << model.status().message();
    EXPECT_FALSE(model->weights.layers[1].moe->experts[2].up.int4.has_value());
    EXPECT_TRUE(model->weights.layers[1].moe->experts[1].up.int4.has_value());
}

TEST(W4a8, other_projections_in_blocks_of_fp8_become_bfloat16) {
    const Exported exported;
    TestTensors tensors = int4_tensors(exported, Form::kTrtLlm);
    const std::string module = "model.layers.1.mlp.shared_mlp.up_proj";
    tensors[module + ".weight"] = {"F8_E4M3", {128, 256}, std::string(128 * 256, '\x39')};
    tensors[module + ".weight_scale_inv"] = {"F32", {1, 2}, testing::float_bytes({2.0F, 0.5F})};
    const TempFolder folder;
    const Result<LoadedModel> model = load(folder, kTrtLlmSection, tensors);
    ASSERT_TRUE(model.ok()) << model.status().message();
    const LinearWeights& up = model->weights.layers[1].moe->shared.up;
    EXPECT_EQ(up.weight.dtype, DType::kBFloat16);
    EXPECT_EQ(source_value(up, 3, 127), 2.25F);
    EXPECT_EQ(source_value(up, 3, 128), 0.5625F);
}

TEST(W4a8, what_is_wrong_is_named) {
    const Exported exported;
    const std::string module = "model.layers.1.mlp.experts.0.gate_proj";
    const auto message = [&](Form form, const std::string& name, const TestTensor& tensor) {
        TestTensors tensors = int4_tensors(exported, form);
        tensors[name] = tensor;
        const TempFolder folder;
        const Status status = load(folder, section_of(form), tensors).status();
        EXPECT_THAT(status.message(), HasSubstr("model.safetensors: tensor " + name));
        return status.message();
    };
    EXPECT_THAT(message(Form::kGptq, module + ".qzeros", {"I32", {2, 16}, std::string(128, '\x78')}),
                HasSubstr("zero points"));
    EXPECT_THAT(message(Form::kGptq, module + ".g_idx", {"I32", {2}, std::string(8, '\0')}),
                HasSubstr("unexpected"));
    EXPECT_THAT(message(Form::kGptq, module + ".scales", {"F16", {2, 128}, std::string(512, '\0')}),
                HasSubstr("BF16"));
    for (const uint16_t bits :
         std::initializer_list<uint16_t>{0x7FC0, 0x7F80, 0xBF80}) {  // NaN, infinity, -1
        std::string scales(512, '\0');
        std::memcpy(scales.data() + 10, &bits, sizeof(bits));
        EXPECT_THAT(message(Form::kGptq, module + ".scales", {"BF16", {2, 128}, scales}),
                    HasSubstr("negative or not finite, at element 5"));
    }
    EXPECT_THAT(message(Form::kTrtLlm, module + ".qweight", {"I8", {128, 64}, std::string(8192, '\0')}),
                HasSubstr("[128, 128]"));
    EXPECT_THAT(message(Form::kPacked, module + ".weight_shape", {"I64", {2}, std::string(16, '\1')}),
                HasSubstr("[128, 256]"));
    EXPECT_THAT(message(Form::kModelOpt, module + ".pre_quant_scale", bfloat16_tensor("p", {256})),
                HasSubstr("unexpected"));
}

TEST(W4a8, a_weight_that_is_not_finite_is_named) {
    TestTensors tensors = float_tensors();
    const uint16_t infinity = 0x7F80;
    std::memcpy(tensors["model.layers.2.mlp.experts.1.up_proj.weight"].bytes.data() + 600, &infinity, 2);
    const TempFolder folder;
    const Result<LoadedModel> model = load(folder, "", tensors);
    ASSERT_TRUE(model.ok()) << model.status().message();
    const TempFolder parent;
    ThreadPool pool(2);
    EXPECT_THAT(export_w4a8(*model, {}, parent.file("out"), pool).message(),
                HasSubstr("model.layers.2.mlp.experts.1.up_proj.weight"));
    EXPECT_TRUE(std::filesystem::is_empty(parent.path()));
}

TEST(W4a8, sizes_that_groups_do_not_fit_are_refused) {
    const TempFolder folder;
    folder.write("config.json", testing::tiny_config());
    folder.write("model.safetensors", safetensors_file(testing::tiny_tensors()));
    const Result<LoadedModel> model = load_model(folder.path());
    ASSERT_TRUE(model.ok());
    const TempFolder parent;
    EXPECT_THAT(check_w4a8_export(*model, parent.file("out")).message(), HasSubstr("hidden_size is 8"));
    const Exported exported;
    EXPECT_THAT(check_w4a8_export(*exported.model, parent.file("out")).message(),
                HasSubstr("quantised already"));
    EXPECT_TRUE(std::filesystem::is_empty(parent.path()));
}

}  // namespace
}  // namespace tessera

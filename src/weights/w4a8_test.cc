// int4 experts: what is exported, and the four forms that are loaded.
#include <cmath>
#include <cstring>
#include <filesystem>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "weights/w4a8_testing.h"

namespace tessera::w4a8_testing {
namespace {

using ::testing::HasSubstr;
using testing::safetensors_file;

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
    EXPECT_THAT(message(Form::kModelOpt, module + ".pre_quant_scale", testing::bfloat16_tensor("p", {256})),
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
}  // namespace tessera::w4a8_testing

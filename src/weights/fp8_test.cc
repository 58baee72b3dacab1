#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "weights/checkpoint/checkpoint_testing.h"
#include "weights/loader.h"

namespace tessera {
namespace {

using testing::bfloat16_tensor;
using testing::float_bytes;
using ::testing::HasSubstr;
using testing::kFp8Section;
using testing::safetensors_file;
using testing::scalar_tensor;
using testing::TempFolder;
using testing::TestTensors;
using testing::tiny_config_with;
using testing::tiny_fp8_tensors;

Result<LoadedModel> load_fp8(const TestTensors& tensors, const std::string& section = kFp8Section) {
    const TempFolder folder;
    folder.write("config.json", tiny_config_with("quantization_config", section));
    folder.write("model.safetensors", safetensors_file(tensors));
    return load_model(folder.path());
}

TEST(Fp8, OfficialFormat) {
    const Result<LoadedModel> model = load_fp8(tiny_fp8_tensors());
    ASSERT_TRUE(model.ok()) << model.status().message();
    const AttentionWeights& attention = model->weights.layers[1].attention;
    EXPECT_EQ(attention.q.weight.dtype, DType::kFloat8E4M3);
    EXPECT_EQ(attention.q.weight_scale, 0.25F);
    EXPECT_EQ(attention.q.input_scale, 0.5F);
    EXPECT_EQ(attention.k_scale, 2.0F);
    EXPECT_EQ(attention.v_scale, 3.0F);
    EXPECT_TRUE(model->weights.kv_scales_static);
    EXPECT_EQ(model->weights.layers[1].moe->experts[2].down.weight.dtype, DType::kFloat8E4M3);
    EXPECT_EQ(model->weights.layers[1].moe->router.dtype, DType::kBFloat16);
    EXPECT_EQ(model->weights.mtp->projection.weight.dtype, DType::kBFloat16);
    EXPECT_FALSE(model->weights.lm_head.weight_scale.has_value());
}

TEST(Fp8, KvScalesInTheirOwnFile) {
    TestTensors weights;
    TestTensors scales;
    for (const auto& [name, tensor] : tiny_fp8_tensors()) {
        (name.find("_cache.scale") != std::string::npos ? scales : weights)[name] = tensor;
    }
    const TempFolder folder;
    folder.write("config.json", tiny_config_with("quantization_config", kFp8Section));
    folder.write("model.safetensors", safetensors_file(weights));
    folder.write("kv_cache_scales.safetensors", safetensors_file(scales));
    const Result<LoadedModel> model = load_model(folder.path());
    ASSERT_TRUE(model.ok()) << model.status().message();
    EXPECT_EQ(model->weights.mtp->layer.attention.v_scale, 3.0F);
}

TEST(Fp8, OtherSpellingsOfKvScales) {
    for (const auto& [k_name, v_name] :
         {std::pair{"k_scale", "v_scale"}, std::pair{"k_proj.k_scale", "v_proj.v_scale"},
          std::pair{"attn.k_scale", "attn.v_scale"}}) {
        TestTensors tensors;
        for (const auto& [name, tensor] : tiny_fp8_tensors()) {
            std::string renamed = name;
            if (const size_t place = renamed.find("k_cache.scale"); place != std::string::npos) {
                renamed.replace(place, 13, k_name);
            } else if (const size_t v_place = renamed.find("v_cache.scale"); v_place != std::string::npos) {
                renamed.replace(v_place, 13, v_name);
            }
            tensors[renamed] = tensor;
        }
        const Result<LoadedModel> model = load_fp8(tensors);
        ASSERT_TRUE(model.ok()) << model.status().message();
        EXPECT_EQ(model->weights.layers[0].attention.k_scale, 2.0F);
        EXPECT_EQ(model->weights.layers[0].attention.v_scale, 3.0F);
    }
}

TEST(Fp8, MtpMayLackKvScalesTheTrunkMayNot) {
    TestTensors tensors = tiny_fp8_tensors();
    tensors.erase("model.layers.2.self_attn.k_cache.scale");
    tensors.erase("model.layers.2.self_attn.v_cache.scale");
    const Result<LoadedModel> model = load_fp8(tensors);
    ASSERT_TRUE(model.ok()) << model.status().message();
    EXPECT_EQ(model->weights.mtp->layer.attention.k_scale, 1.0F);
    tensors.erase("model.layers.1.self_attn.v_cache.scale");
    EXPECT_THAT(load_fp8(tensors).status().message(),
                HasSubstr("model.layers.1.self_attn.v_scale is missing"));
}

TEST(Fp8, IgnoredLayersStayAsTheyAre) {
    TestTensors tensors = tiny_fp8_tensors();
    const std::string module = "model.layers.1.mlp.shared_mlp.up_proj";
    tensors[module + ".weight"] = bfloat16_tensor("u", {4, 8});
    EXPECT_THAT(load_fp8(tensors).status().message(), HasSubstr("ignored_layers does not list " + module));
    tensors.erase(module + ".weight_scale");
    tensors.erase(module + ".input_scale");
    const Result<LoadedModel> model = load_fp8(
        tensors, R"({"quant_method": "fp8", "activation_scheme": "static", "kv_cache_scheme": "static",
                              "ignored_layers": [")" +
                     module + R"("]})");
    ASSERT_TRUE(model.ok()) << model.status().message();
    EXPECT_EQ(model->weights.layers[1].moe->shared.up.weight.dtype, DType::kBFloat16);
    EXPECT_FALSE(model->weights.layers[1].moe->shared.up.weight_scale.has_value());
}

TEST(Fp8, BadScales) {
    const std::string name = "model.layers.0.mlp.down_proj.input_scale";
    TestTensors tensors = tiny_fp8_tensors();
    tensors.erase(name);
    EXPECT_THAT(load_fp8(tensors).status().message(), HasSubstr(name + " is missing"));
    for (const testing::TestTensor& wrong :
         {scalar_tensor(0), scalar_tensor(-1), scalar_tensor(INFINITY), scalar_tensor(NAN),
          testing::TestTensor{"F32", {2}, float_bytes({1, 1})}, bfloat16_tensor("s", {1})}) {
        tensors[name] = wrong;
        EXPECT_THAT(load_fp8(tensors).status().message(), HasSubstr(name + " is"));
    }
    tensors[name] = {"F32", {}, float_bytes({1})};
    EXPECT_TRUE(load_fp8(tensors).ok());
}

TEST(Fp8, PlacesThatAreNeverQuantised) {
    TestTensors tensors = tiny_fp8_tensors();
    tensors["model.layers.2.eh_proj.weight"] = {"F8_E4M3", {8, 16}, std::string(128, '\x38')};
    EXPECT_THAT(load_fp8(tensors).status().message(), HasSubstr("eh_proj.weight is F8_E4M3"));
}

TEST(Fp8, FusedExpertsAreRefused) {
    TestTensors tensors = tiny_fp8_tensors();
    std::erase_if(tensors,
                  [](const auto& item) { return item.first.find(".1.mlp.experts.") != std::string::npos; });
    tensors["model.layers.1.mlp.experts.gate_up_proj"] = bfloat16_tensor("g", {3, 8, 8});
    tensors["model.layers.1.mlp.experts.down_proj"] = bfloat16_tensor("d", {3, 8, 4});
    const Result<LoadedModel> model = load_fp8(tensors);
    ASSERT_FALSE(model.ok());
    EXPECT_EQ(model.status().code(), StatusCode::kUnimplemented);
}

}  // namespace
}  // namespace tessera

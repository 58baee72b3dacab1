// FP8 with dynamic activations: a scale for each block of 128 x 128, or one for the tensor.
#include <cmath>
#include <cstring>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <map>

#include "weights/bind/float_convert.h"
#include "weights/checkpoint/checkpoint_testing.h"
#include "weights/checkpoint/sized_model_testing.h"
#include "weights/fp8_blocks.h"
#include "weights/loader.h"
#include "weights/w4a8_export.h"

namespace tessera {
namespace {

using testing::float_bytes;
using ::testing::HasSubstr;
using testing::scalar_tensor;
using testing::TempFolder;
using testing::TestTensor;
using testing::TestTensors;

constexpr testing::Sizes kSizes{.hidden = 300, .width = 150};  // the last blocks end early
constexpr const char* kBlockSection =
    R"({"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3", "weight_block_size": [128, 128],
        "modules_to_not_convert": ["lm_head"]})";
constexpr const char* kTensorSection =
    R"({"quant_method": "fp8", "activation_scheme": "dynamic", "ignored_layers": ["lm_head"]})";

enum class Form { kPlain, kBlocks, kTensor };

const char* section_of(Form form) {
    return form == Form::kPlain ? "" : form == Form::kBlocks ? kBlockSection : kTensorSection;
}

Result<LoadedModel> load(Form form, const TestTensors& tensors, const char* section = nullptr) {
    const TempFolder folder;
    folder.write("config.json",
                 testing::sized_config(kSizes, section == nullptr ? section_of(form) : section));
    folder.write("model.safetensors", testing::safetensors_file(tensors));
    return load_model(folder.path());
}

int64_t blocks_of(int64_t extent) {
    return (extent + kFp8Block - 1) / kFp8Block;
}

// A power of two, other from block to block.
float block_scale(int64_t block) {
    return std::ldexp(1.0F, static_cast<int>(block * 5 % 3) - 1);
}

uint8_t code_of(float value) {
    static const std::map<float, uint8_t> codes = [] {
        std::map<float, uint8_t> all;
        for (int code = 0; code < 256; ++code) {
            if ((code & 0x7F) != 0x7F) {
                all.emplace(e4m3_value(static_cast<uint8_t>(code)), static_cast<uint8_t>(code));
            }
        }
        return all;
    }();
    return codes.at(value);
}

// Weights that e4m3 holds exactly with block_scale() and with a scale of 2 for the whole tensor: random ones
// cut to 4 significant bits of magnitudes from 2^-4 on.
void quantise(TestTensors& tensors, const std::string& module, Form form) {
    TestTensor& tensor = tensors[module + ".weight"];
    const int64_t rows = tensor.shape[0];
    const int64_t cols = tensor.shape[1];
    std::string codes(static_cast<size_t>(rows * cols), '\0');
    std::vector<float> scales;
    for (int64_t i = 0; i < blocks_of(rows) * blocks_of(cols); ++i) {
        scales.push_back(block_scale(i));
    }
    for (int64_t i = 0; i < rows * cols; ++i) {
        uint16_t bits = 0;
        std::memcpy(&bits, tensor.bytes.data() + 2 * i, 2);
        bits = static_cast<uint16_t>(bits & 0xFFF0);
        float value = float_from_bfloat16(bits);
        value = std::fabs(value) < 0x1p-4F ? 0 : value;
        bits = bfloat16_bits(value);
        std::memcpy(tensor.bytes.data() + 2 * i, &bits, 2);
        const int64_t block = i / cols / kFp8Block * blocks_of(cols) + i % cols / kFp8Block;
        const float scale = form == Form::kBlocks ? scales[static_cast<size_t>(block)] : 2;
        codes[static_cast<size_t>(i)] = static_cast<char>(code_of(value / scale));
    }
    if (form == Form::kPlain) {
        return;
    }
    tensor = {"F8_E4M3", {rows, cols}, codes};
    if (form == Form::kBlocks) {
        tensors[module + ".weight_scale_inv"] = {
            "F32", {blocks_of(rows), blocks_of(cols)}, float_bytes(scales)};
    } else {
        tensors[module + ".weight_scale"] = scalar_tensor(2);
        tensors[module + ".input_scale"] = scalar_tensor(INFINITY);  // passed over
    }
}

bool is_expert(const std::string& name) {
    return name.find(".mlp.experts.") != std::string::npos;
}

// eh_proj too: what is stored in e4m3 is read, wherever it is. experts: the routed ones in that form, too.
TestTensors tensors_in(Form form, bool experts = true) {
    TestTensors tensors = testing::sized_tensors(kSizes);
    for (const auto& [name, tensor] : testing::sized_tensors(kSizes)) {
        if (name.ends_with("_proj.weight") && (experts || !is_expert(name))) {
            quantise(tensors, name.substr(0, name.size() - std::strlen(".weight")), form);
        }
    }
    return tensors;
}

struct Linears {
    std::vector<const LinearWeights*> experts, others;
};

Linears linears_of(const ModelWeights& weights) {
    Linears out;
    const auto add_mlp = [](const MlpWeights& mlp, std::vector<const LinearWeights*>& to) {
        to.insert(to.end(), {&mlp.gate, &mlp.up, &mlp.down});
    };
    const auto add_layer = [&](const LayerWeights& layer) {
        const AttentionWeights& attention = layer.attention;
        out.others.insert(out.others.end(), {&attention.q, &attention.k, &attention.v, &attention.o});
        if (layer.dense) {
            add_mlp(*layer.dense, out.others);
            return;
        }
        add_mlp(layer.moe->shared, out.others);
        for (const MlpWeights& expert : layer.moe->experts) {
            add_mlp(expert, out.experts);
        }
    };
    for (const LayerWeights& layer : weights.layers) {
        add_layer(layer);
    }
    add_layer(weights.mtp->layer);
    out.others.push_back(&weights.mtp->projection);
    return out;
}

std::vector<uint16_t> bfloat16_of(const LinearWeights& linear) {
    std::vector<uint16_t> out(static_cast<size_t>(linear.weight.rows * linear.weight.cols));
    if (linear.blocks) {
        fp8_blocks_to_bf16(linear, out.data());
    } else {
        EXPECT_EQ(linear.weight.dtype, DType::kBFloat16);
        std::memcpy(out.data(), linear.weight.data, out.size() * 2);
    }
    return out;
}

TEST(Fp8Dynamic, BothFormsAreOneInMemoryAndHoldTheSameWeights) {
    const Result<LoadedModel> plain = load(Form::kPlain, tensors_in(Form::kPlain));
    ASSERT_TRUE(plain.ok()) << plain.status().message();
    const Linears want = linears_of(plain->weights);
    for (const Form form : {Form::kBlocks, Form::kTensor}) {
        const Result<LoadedModel> model = load(form, tensors_in(form));
        ASSERT_TRUE(model.ok()) << model.status().message();
        const Linears got = linears_of(model->weights);
        ASSERT_EQ(got.experts.size(), 2 * 3 * 3U);
        for (size_t i = 0; i < got.experts.size(); ++i) {
            const LinearWeights& linear = *got.experts[i];
            EXPECT_EQ(linear.weight.dtype, DType::kFloat8E4M3);
            ASSERT_TRUE(linear.blocks.has_value());
            EXPECT_FALSE(linear.weight_scale.has_value());
            EXPECT_FALSE(linear.input_scale.has_value());
            EXPECT_EQ(bfloat16_of(linear), bfloat16_of(*want.experts[i])) << i;
        }
        ASSERT_EQ(got.others.size(), want.others.size());
        for (size_t i = 0; i < got.others.size(); ++i) {
            EXPECT_FALSE(got.others[i]->blocks.has_value());
            EXPECT_EQ(bfloat16_of(*got.others[i]), bfloat16_of(*want.others[i])) << i;
        }
    }
}

TEST(Fp8Dynamic, ScalesMayBeBFloat16) {
    TestTensors tensors = tensors_in(Form::kBlocks);
    for (auto& [name, tensor] : tensors) {
        if (name.ends_with("_scale_inv")) {
            std::string halves;
            for (size_t i = 0; i < tensor.bytes.size(); i += 4) {
                halves += tensor.bytes.substr(i + 2, 2);
            }
            tensor = {"BF16", tensor.shape, halves};
        }
    }
    const Result<LoadedModel> model = load(Form::kBlocks, tensors);
    ASSERT_TRUE(model.ok()) << model.status().message();
    const Result<LoadedModel> wide = load(Form::kBlocks, tensors_in(Form::kBlocks));
    EXPECT_EQ(bfloat16_of(model->weights.layers[1].moe->experts[2].down),
              bfloat16_of(wide->weights.layers[1].moe->experts[2].down));
}

TEST(Fp8Dynamic, ModulesThatAreNotConvertedStayAsTheyAre) {
    const std::string module = "model.layers.1.mlp.experts.1.up_proj";
    TestTensors tensors = tensors_in(Form::kBlocks);
    tensors[module + ".weight"] = tensors_in(Form::kPlain)[module + ".weight"];
    tensors.erase(module + ".weight_scale_inv");
    EXPECT_THAT(load(Form::kBlocks, tensors).status().message(),
                HasSubstr("ignored_layers does not list " + module));
    const std::string section =
        R"({"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128],
            "modules_to_not_convert": [")" +
        module + R"("]})";
    const Result<LoadedModel> model = load(Form::kBlocks, tensors, section.c_str());
    ASSERT_TRUE(model.ok()) << model.status().message();
    const MlpWeights& expert = model->weights.layers[1].moe->experts[1];
    EXPECT_EQ(expert.up.weight.dtype, DType::kBFloat16);
    EXPECT_FALSE(expert.up.blocks.has_value());
    EXPECT_TRUE(expert.gate.blocks.has_value());
}

TEST(Fp8Dynamic, WhatIsWrongIsNamed) {
    const TestTensors blocks = tensors_in(Form::kBlocks);
    const TestTensors tensor = tensors_in(Form::kTensor);
    const auto message = [&](Form form, const std::string& name, const TestTensor& wrong) {
        TestTensors tensors = form == Form::kBlocks ? blocks : tensor;
        if (wrong.dtype.empty()) {
            tensors.erase(name);
        } else {
            tensors[name] = wrong;
        }
        const Result<LoadedModel> model = load(form, tensors);
        EXPECT_FALSE(model.ok());
        EXPECT_THAT(model.status().message(), HasSubstr("tensor " + name));
        return model.status().message();
    };
    for (const std::string module : {"model.layers.1.mlp.experts.0.gate_proj",
                                     "model.layers.2.mlp.shared_mlp.gate_proj"}) {  // [150, 300]
        const std::string scales = module + ".weight_scale_inv";
        for (const float wrong : {0.0F, -1.0F, INFINITY, NAN}) {
            EXPECT_THAT(message(Form::kBlocks, scales, {"F32", {2, 3}, float_bytes({1, 1, 1, 1, wrong, 1})}),
                        HasSubstr("at element 4; a scale must be positive and finite"));
        }
        EXPECT_THAT(message(Form::kBlocks, scales, {"F32", {3, 2}, float_bytes({1, 1, 1, 1, 1, 1})}),
                    HasSubstr("[2, 3]"));
        EXPECT_THAT(message(Form::kBlocks, scales, {"I32", {2, 3}, std::string(24, '\1')}),
                    HasSubstr("scales must be F32, BF16 or F16"));
        EXPECT_THAT(message(Form::kTensor, module + ".weight_scale", scalar_tensor(0)),
                    HasSubstr("positive"));
        EXPECT_THAT(message(Form::kBlocks, scales, {}), HasSubstr("missing"));
        EXPECT_THAT(message(Form::kTensor, module + ".weight_scale", {}), HasSubstr("missing"));
        EXPECT_THAT(message(Form::kTensor, module + ".weight_scale", scalar_tensor(1e36F)),
                    HasSubstr("and so must 448 times it"));
    }
    const std::string head = "model.layers.2.eh_proj.weight";
    EXPECT_THAT(message(Form::kTensor, head, tensors_in(Form::kPlain)[head]), HasSubstr("scales beside it"));
}

TEST(Fp8Dynamic, FusedExpertsAreRefused) {
    TestTensors tensors = tensors_in(Form::kBlocks);
    std::erase_if(tensors,
                  [](const auto& item) { return item.first.find(".1.mlp.experts.") != std::string::npos; });
    tensors["model.layers.1.mlp.experts.gate_up_proj"] = testing::bfloat16_tensor("g", {3, 300, 300});
    tensors["model.layers.1.mlp.experts.down_proj"] = testing::bfloat16_tensor("d", {3, 300, 150});
    EXPECT_EQ(load(Form::kBlocks, tensors).status().code(), StatusCode::kUnimplemented);
}

TEST(Fp8Dynamic, ScalesOfTheOtherFormAreNamed) {
    EXPECT_THAT(
        load(Form::kBlocks, tensors_in(Form::kTensor)).status().message(),
        HasSubstr(
            "weight_scale is there; with one scale a tensor config.json must have no weight_block_size"));
    EXPECT_THAT(load(Form::kTensor, tensors_in(Form::kBlocks)).status().message(),
                HasSubstr("weight_scale_inv is there, which needs weight_block_size [128, 128]"));
}

// Also where nothing of it is left once it is loaded: experts ignored, and the others made bfloat16.
TEST(Fp8Dynamic, IsNotQuantisedOnceMore) {
    const TempFolder parent;
    for (const bool experts : {true, false}) {
        const TestTensors tensors = tensors_in(Form::kTensor, experts);
        json::Value ignored = json::Value::array({"lm_head"});
        for (const auto& [name, tensor] : tensors) {
            if (!experts && is_expert(name)) {
                ignored.push_back(name.substr(0, name.size() - std::strlen(".weight")));
            }
        }
        json::Value section = *json::parse(kTensorSection);
        section.set("ignored_layers", ignored);
        const Result<LoadedModel> model = load(Form::kTensor, tensors, json::dump(section).c_str());
        ASSERT_TRUE(model.ok()) << model.status().message();
        EXPECT_THAT(check_w4a8_export(*model, parent.file("out")).message(), HasSubstr("quantised already"));
    }
}

}  // namespace
}  // namespace tessera

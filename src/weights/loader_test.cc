#include "weights/loader.h"

#include <atomic>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "weights/checkpoint/checkpoint_testing.h"

namespace tessera {
namespace {

using testing::bfloat16_tensor;
using testing::float_bytes;
using ::testing::HasSubstr;
using testing::safetensors_file;
using testing::TempFolder;
using testing::TestTensors;
using testing::tiny_config;
using testing::tiny_config_with;
using testing::tiny_tensors;

// A folder with the tiny model in one file.
class TinyFolder : public TempFolder {
  public:
    explicit TinyFolder(const TestTensors& tensors = tiny_tensors(),
                        const std::string& config = tiny_config()) {
        write("config.json", config);
        write("model.safetensors", safetensors_file(tensors));
    }
};

Result<LoadedModel> load_tensors(const TestTensors& tensors, const std::string& config = tiny_config()) {
    const TinyFolder folder(tensors, config);
    return load_model(folder.path());  // the maps stay valid after the files have gone
}

std::string error_of(const TestTensors& tensors, const std::string& config = tiny_config()) {
    const Result<LoadedModel> model = load_tensors(tensors, config);
    EXPECT_FALSE(model.ok());
    return model.status().message();
}

std::string bytes_of(const WeightView& view) {
    return {static_cast<const char*>(view.data),
            static_cast<size_t>(view.rows * view.cols * dtype_size(view.dtype))};
}

// The views of two models in the same order, so that they can be compared one by one.
std::vector<WeightView> all_views(const ModelWeights& weights) {
    std::vector<WeightView> views = {weights.embedding, weights.lm_head.weight, weights.final_norm};
    const auto add_mlp = [&](const MlpWeights& mlp) {
        views.insert(views.end(), {mlp.gate.weight, mlp.up.weight, mlp.down.weight});
    };
    const auto add_layer = [&](const LayerWeights& layer) {
        const AttentionWeights& a = layer.attention;
        views.insert(views.end(), {layer.input_norm, layer.post_attention_norm, a.q.weight, a.k.weight,
                                   a.v.weight, a.o.weight, a.q_norm, a.k_norm});
        if (layer.dense) {
            add_mlp(*layer.dense);
        }
        if (layer.moe) {
            views.insert(views.end(), {layer.moe->router, layer.moe->expert_bias});
            add_mlp(layer.moe->shared);
            for (const MlpWeights& expert : layer.moe->experts) {
                add_mlp(expert);
            }
        }
    };
    for (const LayerWeights& layer : weights.layers) {
        add_layer(layer);
    }
    if (weights.mtp) {
        const MtpWeights& mtp = *weights.mtp;
        views.insert(views.end(),
                     {mtp.embedding_norm, mtp.hidden_norm, mtp.final_norm, mtp.projection.weight});
        add_layer(mtp.layer);
    }
    return views;
}

void expect_same_views(const ModelWeights& a, const ModelWeights& b) {
    const std::vector<WeightView> left = all_views(a);
    const std::vector<WeightView> right = all_views(b);
    ASSERT_EQ(left.size(), right.size());
    for (size_t i = 0; i < left.size(); ++i) {
        EXPECT_EQ(left[i].rows, right[i].rows);
        EXPECT_EQ(left[i].cols, right[i].cols);
        EXPECT_EQ(left[i].dtype, right[i].dtype);
        EXPECT_EQ(bytes_of(left[i]), bytes_of(right[i])) << "view " << i;
    }
}

// The outer layout of the same model: renamed, and experts fused.
TestTensors outer_tensors(const TestTensors& inner) {
    TestTensors outer;
    for (const auto& [name, tensor] : inner) {
        std::string renamed = name;
        const auto rename = [&](std::string_view from, std::string_view to) {
            if (const size_t place = renamed.find(from); place != std::string::npos) {
                renamed.replace(place, from.size(), to);
            }
        };
        rename(".mlp.router.gate.", ".mlp.gate.");
        rename(".mlp.expert_bias", ".mlp.e_score_correction_bias");
        rename(".mlp.shared_mlp.", ".mlp.shared_experts.");
        if (name.find(".experts.") == std::string::npos) {
            outer[renamed] = tensor;
        }
    }
    for (const char* prefix : {"model.layers.1.mlp.experts.", "model.layers.2.mlp.experts."}) {
        testing::TestTensor gate_up{"BF16", {3, 8, 8}, ""};
        testing::TestTensor down{"BF16", {3, 8, 4}, ""};
        for (const char* expert : {"0.", "1.", "2."}) {
            const std::string base = std::string(prefix) + expert;
            gate_up.bytes +=
                inner.at(base + "gate_proj.weight").bytes + inner.at(base + "up_proj.weight").bytes;
            down.bytes += inner.at(base + "down_proj.weight").bytes;
        }
        outer[std::string(prefix) + "gate_up_proj"] = gate_up;
        outer[std::string(prefix) + "down_proj"] = down;
    }
    return outer;
}

TEST(Loader, DemonstrationModel) {
    std::atomic<int64_t> last{0};
    std::atomic<int64_t> total{0};
    const Result<LoadedModel> model = load_model(TESSERA_SOURCE_DIR "/models/demo",
                                                 {.threads = 2, .progress = [&](int64_t done, int64_t all) {
                                                      last = std::max(last.load(), done);
                                                      total = all;
                                                  }});
    ASSERT_TRUE(model.ok()) << model.status().message();
    EXPECT_EQ(model->weight_bytes, 42660736);
    EXPECT_EQ(last.load(), total.load());
    EXPECT_GT(total.load(), model->weight_bytes);
    EXPECT_EQ(model->weights.layers.size(), 6U);
    EXPECT_TRUE(model->weights.layers[0].dense.has_value());
    EXPECT_EQ(model->weights.layers[5].moe->experts.size(), 16U);
    EXPECT_EQ(model->weights.layers[5].moe->expert_bias.dtype, DType::kFloat32);
    EXPECT_EQ(model->weights.mtp->projection.weight.cols, 512);
    EXPECT_DOUBLE_EQ(model->generation.temperature, 0.9);
    EXPECT_FALSE(model->weights.kv_scales_static);
    const std::string before = bytes_of(model->weights.final_norm);
    model->drop_pages();
    EXPECT_EQ(bytes_of(model->weights.final_norm), before);
}

TEST(Loader, EveryTensorIsBoundToItsBytes) {
    const TestTensors tensors = tiny_tensors();
    const Result<LoadedModel> model = load_tensors(tensors);
    ASSERT_TRUE(model.ok()) << model.status().message();
    const ModelWeights& weights = model->weights;
    EXPECT_EQ(all_views(weights).size(), tensors.size());
    EXPECT_EQ(bytes_of(weights.embedding), tensors.at("model.embed_tokens.weight").bytes);
    EXPECT_EQ(bytes_of(weights.layers[0].dense->down.weight),
              tensors.at("model.layers.0.mlp.down_proj.weight").bytes);
    EXPECT_EQ(bytes_of(weights.layers[1].moe->experts[2].up.weight),
              tensors.at("model.layers.1.mlp.experts.2.up_proj.weight").bytes);
    EXPECT_EQ(bytes_of(weights.mtp->layer.moe->expert_bias), float_bytes({0.5F, -0.25F, 2.0F}));
    EXPECT_EQ(weights.layers[1].attention.o.weight.rows, 8);
    EXPECT_EQ(weights.layers[1].attention.o.weight.cols, 16);
}

TEST(Loader, OuterLayoutGivesTheSameViews) {
    const TestTensors inner = tiny_tensors();
    const Result<LoadedModel> a = load_tensors(inner);
    const Result<LoadedModel> b = load_tensors(outer_tensors(inner));
    ASSERT_TRUE(a.ok()) << a.status().message();
    ASSERT_TRUE(b.ok()) << b.status().message();
    expect_same_views(a->weights, b->weights);
}

TEST(Loader, ShardsWithAndWithoutIndex) {
    const TestTensors tensors = tiny_tensors();
    TestTensors halves[2];
    json::Value map = json::Value::object();
    size_t count = 0;
    for (const auto& [name, tensor] : tensors) {
        const size_t half = count++ % 2;
        halves[half][name] = tensor;
        map.set(name, json::Value(half == 0 ? "a.safetensors" : "b.safetensors"));
    }
    const Result<LoadedModel> whole = load_tensors(tensors);
    const TempFolder folder;
    folder.write("config.json", tiny_config());
    folder.write("a.safetensors", safetensors_file(halves[0]));
    folder.write("b.safetensors", safetensors_file(halves[1]));
    const Result<LoadedModel> scanned = load_model(folder.path());
    ASSERT_TRUE(scanned.ok()) << scanned.status().message();
    folder.write("model.safetensors.index.json", "{\"weight_map\": " + json::dump(map) + "}");
    folder.write("unrelated.safetensors", "not read, because the index does not name it");
    const Result<LoadedModel> indexed = load_model(folder.path());
    ASSERT_TRUE(indexed.ok()) << indexed.status().message();
    expect_same_views(whole->weights, scanned->weights);
    expect_same_views(whole->weights, indexed->weights);
    EXPECT_EQ(whole->fingerprint, indexed->fingerprint);
}

TEST(Loader, IndexThatDoesNotFit) {
    const TinyFolder folder;
    folder.write("model.safetensors.index.json", R"({"weight_map": {"w": "gone.safetensors"}})");
    EXPECT_THAT(load_model(folder.path()).status().message(), HasSubstr("gone.safetensors"));
    folder.write("model.safetensors.index.json", R"({"weight_map": {"no.such": "model.safetensors"}})");
    const std::string error = load_model(folder.path()).status().message();
    EXPECT_THAT(error, HasSubstr("model.safetensors.index.json: places tensor no.such in model.safetensors"));
}

TEST(Loader, MissingTensors) {
    for (const char* name :
         {"model.embed_tokens.weight", "lm_head.weight", "model.layers.1.mlp.expert_bias",
          "model.layers.1.mlp.experts.1.up_proj.weight", "model.layers.0.self_attn.q_norm.weight"}) {
        TestTensors tensors = tiny_tensors();
        tensors.erase(name);
        EXPECT_THAT(error_of(tensors), HasSubstr(std::string("tensor ") + name + " is missing"));
    }
    TestTensors tensors = tiny_tensors();
    tensors.erase("model.layers.2.enorm.weight");
    EXPECT_THAT(error_of(tensors), HasSubstr("num_nextn_predict_layers"));
}

TEST(Loader, UnexpectedTensors) {
    for (const char* name : {"model.layers.1.self_attn.q_proj.bias", "model.layers.3.input_layernorm.weight",
                             "model.layers.1.mlp.experts.3.up_proj.weight", "extra"}) {
        TestTensors tensors = tiny_tensors();
        tensors[name] = {"I64", {1}, std::string(8, 'x')};
        const std::string error = error_of(tensors);
        EXPECT_THAT(error, HasSubstr("model.safetensors"));
        EXPECT_THAT(error, HasSubstr(std::string("tensor ") + name + " is unexpected"));
    }
}

TEST(Loader, TensorsThatNoEngineNeedsAreSkipped) {
    TestTensors tensors = tiny_tensors();
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = {"F64", {1}, std::string(8, 'x')};
    tensors["model.layers.2.embed_tokens.weight"] = bfloat16_tensor("x", {32, 8});
    tensors["model.layers.2.shared_head.head.weight"] = bfloat16_tensor("y", {32, 8});
    const Result<LoadedModel> model = load_tensors(tensors);
    EXPECT_TRUE(model.ok()) << model.status().message();
}

TEST(Loader, WrongShapesAndTypes) {
    TestTensors tensors = tiny_tensors();
    tensors["model.layers.1.self_attn.k_proj.weight"] = bfloat16_tensor("k", {16, 8});
    EXPECT_THAT(error_of(tensors),
                HasSubstr("model.layers.1.self_attn.k_proj.weight has shape [16, 8]; config.json "
                          "makes it [8, 8]"));
    tensors = tiny_tensors();
    tensors["model.norm.weight"] = {"BF16", {0, 8}, ""};
    EXPECT_THAT(error_of(tensors), HasSubstr("model.norm.weight has shape [0, 8]"));
    tensors = tiny_tensors();
    tensors["model.norm.weight"] = {"F64", {8}, std::string(64, 'x')};
    EXPECT_THAT(error_of(tensors), HasSubstr("model.norm.weight is of type F64"));
    tensors = tiny_tensors();
    tensors["model.layers.0.self_attn.q_proj.weight"] = {"F8_E4M3", {16, 8}, std::string(128, '\x38')};
    EXPECT_THAT(error_of(tensors), HasSubstr("no quantization_config"));
}

TEST(Loader, DuplicateTensors) {
    const TempFolder folder;
    folder.write("config.json", tiny_config());
    folder.write("a.safetensors", safetensors_file(tiny_tensors()));
    folder.write("b.safetensors", safetensors_file({{"model.norm.weight", bfloat16_tensor("n", {8})}}));
    const std::string error = load_model(folder.path()).status().message();
    EXPECT_THAT(error, HasSubstr("b.safetensors: tensor model.norm.weight is a duplicate"));
    EXPECT_THAT(error, HasSubstr("a.safetensors"));
    TestTensors both = tiny_tensors();  // the same tensor under its inner and its outer name
    both["model.layers.1.mlp.gate.weight"] = bfloat16_tensor("g", {3, 8});
    EXPECT_THAT(error_of(both), HasSubstr("is a duplicate"));
}

TEST(Loader, TruncatedShard) {
    const TinyFolder folder;
    const std::string file = safetensors_file(tiny_tensors());
    folder.write("model.safetensors", file.substr(0, file.size() - 100));
    const Result<LoadedModel> model = load_model(folder.path());
    ASSERT_FALSE(model.ok());
    EXPECT_EQ(model.status().code(), StatusCode::kDataLoss);
    EXPECT_THAT(model.status().message(), HasSubstr("model.safetensors: truncated: tensor"));
}

TEST(Loader, FoldersWithoutAModel) {
    const TempFolder folder;
    EXPECT_THAT(load_model(folder.path()).status().message(), HasSubstr("config.json"));
    folder.write("config.json", tiny_config());
    EXPECT_THAT(load_model(folder.path()).status().message(), HasSubstr("no weights"));
    EXPECT_EQ(load_model("/nonexistent").status().code(), StatusCode::kNotFound);
    folder.write("model.safetensors", "");
    EXPECT_THAT(load_model(folder.path()).status().message(), HasSubstr("model.safetensors: 0 bytes"));
}

TEST(Loader, ExpertBiasIsWidened) {
    TestTensors tensors = tiny_tensors();
    tensors["model.layers.1.mlp.expert_bias"] = {"BF16", {3}, std::string("\x80\x3f\x00\x40\x40\x40", 6)};
    const Result<LoadedModel> model = load_tensors(tensors);
    ASSERT_TRUE(model.ok()) << model.status().message();
    EXPECT_EQ(model->weights.layers[1].moe->expert_bias.dtype, DType::kFloat32);
    EXPECT_EQ(bytes_of(model->weights.layers[1].moe->expert_bias), float_bytes({1, 2, 3}));
}

TEST(Loader, ModelsWithoutBiasOrMtpOrHead) {
    TestTensors tensors = tiny_tensors();
    std::erase_if(tensors, [](const auto& item) { return item.first.starts_with("model.layers.2."); });
    const Result<LoadedModel> plain =
        load_tensors(tensors, tiny_config_with("num_nextn_predict_layers", "0"));
    ASSERT_TRUE(plain.ok()) << plain.status().message();
    EXPECT_FALSE(plain->weights.mtp.has_value());

    tensors = tiny_tensors();
    std::erase_if(tensors, [](const auto& item) { return item.first.ends_with("expert_bias"); });
    const Result<LoadedModel> unbiased =
        load_tensors(tensors, tiny_config_with("moe_router_enable_expert_bias", "false"));
    ASSERT_TRUE(unbiased.ok()) << unbiased.status().message();
    EXPECT_EQ(unbiased->weights.layers[1].moe->expert_bias.data, nullptr);

    tensors = tiny_tensors();
    tensors.erase("lm_head.weight");
    const Result<LoadedModel> tied = load_tensors(tensors, tiny_config_with("tie_word_embeddings", "true"));
    ASSERT_TRUE(tied.ok()) << tied.status().message();
    EXPECT_EQ(tied->weights.lm_head.weight.data, tied->weights.embedding.data);
    EXPECT_THAT(error_of(tiny_tensors(), tiny_config_with("tie_word_embeddings", "true")),
                HasSubstr("lm_head.weight is unexpected"));
}

TEST(Loader, HeadersOfOddLengthStillGiveAlignedViews) {
    for (size_t pad = 0; pad < 2; ++pad) {
        std::string header_padded = safetensors_file(tiny_tensors(), 2);
        uint64_t length = 0;
        std::memcpy(&length, header_padded.data(), 8);
        length += pad;
        std::memcpy(header_padded.data(), &length, 8);
        header_padded.insert(8, pad, ' ');
        const TinyFolder folder;
        folder.write("model.safetensors", header_padded);
        const Result<LoadedModel> model = load_model(folder.path());
        ASSERT_TRUE(model.ok()) << model.status().message();
        for (const WeightView& view : all_views(model->weights)) {
            EXPECT_EQ(reinterpret_cast<uintptr_t>(view.data) % static_cast<uintptr_t>(dtype_size(view.dtype)),
                      0U);
        }
        EXPECT_EQ(bytes_of(model->weights.final_norm), tiny_tensors().at("model.norm.weight").bytes);
    }
}

TEST(Loader, FingerprintFollowsWeightsAndConfig) {
    const TestTensors tensors = tiny_tensors();
    const auto base = load_tensors(tensors)->fingerprint;
    EXPECT_EQ(load_tensors(tensors)->fingerprint, base);
    TestTensors other = tensors;
    other["model.norm.weight"].bytes[3] ^= 1;
    EXPECT_NE(load_tensors(other)->fingerprint, base);
    EXPECT_NE(load_tensors(tensors, tiny_config_with("router_scaling_factor", "2"))->fingerprint, base);
}

}  // namespace
}  // namespace tessera

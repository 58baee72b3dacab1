#include "weights/config/config.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "weights/checkpoint/checkpoint_testing.h"
#include "weights/config/quant_config.h"

namespace tessera {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using testing::tiny_config;
using testing::tiny_config_with;

struct Change {
    const char* key;
    const char* value;  // JSON; null = as if absent
};

std::string changed(std::initializer_list<Change> changes) {
    json::Value config = *json::parse(tiny_config());
    for (const Change& change : changes) {
        config.set(change.key, *json::parse(change.value));
    }
    return json::dump(config);
}

std::string error_of(const std::string& text) {
    const Result<ModelConfig> config = parse_model_config(text);
    EXPECT_FALSE(config.ok());
    return config.status().message();
}

TEST(Config, ReadsEveryField) {
    const Result<ModelConfig> parsed = parse_model_config(tiny_config());
    ASSERT_TRUE(parsed.ok()) << parsed.status().message();
    EXPECT_EQ(parsed->model_type, "hy_v3");
    EXPECT_EQ(parsed->vocab_size, 32);
    EXPECT_EQ(parsed->num_layers, 2);
    EXPECT_EQ(parsed->q_width(), 16);
    EXPECT_EQ(parsed->kv_width(), 8);
    EXPECT_EQ(parsed->num_experts_per_token, 2);
    EXPECT_EQ(parsed->first_k_dense, 1);
    EXPECT_EQ(parsed->num_mtp_layers, 1);
    EXPECT_DOUBLE_EQ(parsed->rope_theta, 11158840.0);
    EXPECT_DOUBLE_EQ(parsed->router_scaling_factor, 2.826);
    EXPECT_FALSE(parsed->moe_fp32_combine);
    EXPECT_TRUE(parsed->lm_head_fp32);
    EXPECT_EQ(parsed->bos_token_id, 1);
    EXPECT_EQ(parsed->pad_token_id, 0);
    EXPECT_THAT(parsed->eos_token_ids, ElementsAre(2));
}

TEST(Config, OtherSizesOfTheArchitecture) {
    struct Size {
        const char *layers, *hidden, *experts, *width, *heads, *kv_heads;
    };
    for (const Size& size :
         {Size{"80", "4096", "192", "1536", "64", "8"}, Size{"48", "2048", "128", "768", "32", "4"},
          Size{"80", "4096", "96", "1536", "64", "8"}}) {
        const Result<ModelConfig> parsed =
            parse_model_config(changed({{"num_hidden_layers", size.layers},
                                        {"hidden_size", size.hidden},
                                        {"num_experts", size.experts},
                                        {"moe_intermediate_size", size.width},
                                        {"expert_hidden_dim", size.width},
                                        {"head_dim", "128"},
                                        {"num_attention_heads", size.heads},
                                        {"num_key_value_heads", size.kv_heads},
                                        {"vocab_size", "120832"},
                                        {"max_position_embeddings", "262144"}}));
        EXPECT_TRUE(parsed.ok()) << parsed.status().message();
    }
}

TEST(Config, AlternativeSpellings) {
    for (const std::string& text :
         {changed({{"moe_intermediate_size", "null"}}), changed({{"expert_hidden_dim", "null"}}),
          changed({{"qk_norm", "null"}, {"use_qk_norm", "true"}}),
          changed({{"rope_parameters", "null"}, {"rope_theta", "11158840"}, {"rope_scaling", "null"}}),
          changed({{"first_k_dense_replace", "null"}, {"mlp_layer_types", R"(["dense", "sparse"])"}}),
          changed({{"mlp_layer_types", R"(["dense", "sparse"])"}}), changed({{"eos_token_id", "[2]"}}),
          changed({{"dtype", R"("bfloat16")"}, {"torch_dtype", R"("float16")"}}),
          changed({{"pad_token_id", "null"}}),
          changed({{"attention_bias", "false"}, {"mlp_bias", "false"}, {"n_group", "1"}})}) {
        const Result<ModelConfig> parsed = parse_model_config(text);
        ASSERT_TRUE(parsed.ok()) << parsed.status().message();
        EXPECT_EQ(parsed->moe_intermediate_size, 4);
        EXPECT_EQ(parsed->first_k_dense, 1);
        EXPECT_DOUBLE_EQ(parsed->rope_theta, 11158840.0);
        EXPECT_THAT(parsed->eos_token_ids, ElementsAre(2));
    }
}

TEST(Config, NothingIsAssumed) {
    for (const char* key : {"model_type",
                            "vocab_size",
                            "hidden_size",
                            "intermediate_size",
                            "num_hidden_layers",
                            "num_attention_heads",
                            "num_key_value_heads",
                            "head_dim",
                            "num_experts",
                            "num_experts_per_tok",
                            "num_shared_experts",
                            "first_k_dense_replace",
                            "num_nextn_predict_layers",
                            "hidden_act",
                            "qk_norm",
                            "rms_norm_eps",
                            "rope_parameters",
                            "max_position_embeddings",
                            "moe_router_use_sigmoid",
                            "moe_router_enable_expert_bias",
                            "route_norm",
                            "router_scaling_factor",
                            "enable_moe_fp32_combine",
                            "enable_lm_head_fp32",
                            "tie_word_embeddings",
                            "bos_token_id",
                            "eos_token_id"}) {
        const std::string error = error_of(tiny_config_with(key, "null"));
        EXPECT_THAT(error, HasSubstr("config.json"));
        EXPECT_THAT(error, HasSubstr(key));
        EXPECT_THAT(error, HasSubstr("missing"));
    }
    EXPECT_THAT(error_of(changed({{"moe_intermediate_size", "null"}, {"expert_hidden_dim", "null"}})),
                HasSubstr("moe_intermediate_size (or expert_hidden_dim) is missing"));
}

TEST(Config, WrongValuesAreNamed) {
    const Change cases[] = {
        {"model_type", "\"llama\""},
        {"vocab_size", "\"32\""},
        {"vocab_size", "0"},
        {"vocab_size", "99999999999999999999"},
        {"hidden_size", "8.5"},
        {"num_hidden_layers", "-1"},
        {"num_hidden_layers", "100000"},
        {"head_dim", "5"},
        {"num_attention_heads", "5"},
        {"num_experts_per_tok", "4"},
        {"num_nextn_predict_layers", "2"},
        {"first_k_dense_replace", "3"},
        {"mlp_layer_types", R"(["sparse", "dense"])"},
        {"mlp_layer_types", R"(["dense"])"},
        {"mlp_layer_types", R"(["dense", 1])"},
        {"mlp_layer_types", R"(["dense", "dense"])"},
        {"hidden_act", "\"gelu\""},
        {"qk_norm", "1"},
        {"qk_norm", "false"},
        {"use_qk_norm", "false"},
        {"rms_norm_eps", "0"},
        {"router_scaling_factor", "-2"},
        {"expert_hidden_dim", "5"},
        {"rope_parameters", "[]"},
        {"rope_parameters", R"({"rope_theta": 10000, "rope_type": "yarn"})"},
        {"rope_parameters", R"({"rope_type": "default"})"},
        {"rope_theta", "10000"},
        {"rope_scaling", R"({"type": "linear", "factor": 2})"},
        {"partial_rotary_factor", "0.5"},
        {"moe_router_use_sigmoid", "false"},
        {"attention_bias", "true"},
        {"mlp_bias", "true"},
        {"sliding_window", "4096"},
        {"n_group", "8"},
        {"bos_token_id", "32"},
        {"eos_token_id", "-1"},
        {"eos_token_id", "[2, 32]"},
        {"eos_token_id", "\"</s>\""},
    };
    for (const Change& change : cases) {
        const std::string error = error_of(changed({change}));
        EXPECT_THAT(error, HasSubstr("config.json")) << change.key;
        EXPECT_THAT(error, HasSubstr(change.key)) << change.value;
        EXPECT_THAT(error, HasSubstr("must")) << change.value;
    }
    EXPECT_EQ(error_of(tiny_config_with("num_hidden_layers", "\"80\"")),
              "config.json: num_hidden_layers is \"80\"; it must be an integer from 1 to 1024");
}

TEST(Config, BadJson) {
    EXPECT_THAT(error_of(""), HasSubstr("config.json: invalid JSON"));
    EXPECT_THAT(error_of("[]"), HasSubstr("must be an object"));
    EXPECT_THAT(error_of("{\"model_type\": NaN}"), HasSubstr("invalid JSON"));
}

TEST(Config, MissingFolder) {
    const Result<ModelConfig> config = load_model_config("/nonexistent/model");
    ASSERT_FALSE(config.ok());
    EXPECT_EQ(config.status().code(), StatusCode::kNotFound);
    EXPECT_THAT(config.status().message(), HasSubstr("/nonexistent/model: there is no such model folder"));
}

TEST(Config, FileThatIsNoFile) {
    const testing::TempFolder folder;
    std::filesystem::create_directory(folder.file("config.json"));
    const Result<ModelConfig> config = load_model_config(folder.path());
    ASSERT_FALSE(config.ok());
    EXPECT_THAT(config.status().message(), HasSubstr("no regular file"));
}

TEST(Generation, AbsentMeansNeutral) {
    const testing::TempFolder folder;
    ModelConfig config = *parse_model_config(tiny_config());
    const Result<GenerationDefaults> defaults = load_generation_defaults(folder.path(), config);
    ASSERT_TRUE(defaults.ok());
    EXPECT_DOUBLE_EQ(defaults->temperature, 1.0);
    EXPECT_EQ(defaults->top_k, 0);
    EXPECT_THAT(config.eos_token_ids, ElementsAre(2));
}

TEST(Generation, ValuesAndEosIds) {
    const testing::TempFolder folder;
    folder.write("generation_config.json",
                 R"({"temperature": 0.9, "top_p": 0.5, "top_k": -1, "min_p": 0.1, "repetition_penalty": 1.05,
                     "eos_token_id": [2, 7], "do_sample": true})");
    ModelConfig config = *parse_model_config(tiny_config());
    const Result<GenerationDefaults> defaults = load_generation_defaults(folder.path(), config);
    ASSERT_TRUE(defaults.ok()) << defaults.status().message();
    EXPECT_DOUBLE_EQ(defaults->temperature, 0.9);
    EXPECT_DOUBLE_EQ(defaults->top_p, 0.5);
    EXPECT_EQ(defaults->top_k, 0);
    EXPECT_DOUBLE_EQ(defaults->min_p, 0.1);
    EXPECT_DOUBLE_EQ(defaults->repetition_penalty, 1.05);
    EXPECT_THAT(config.eos_token_ids, ElementsAre(2, 7));
}

TEST(Generation, WrongValuesAreNamed) {
    for (const Change& change : {Change{"temperature", "-1"}, Change{"temperature", "\"hot\""},
                                 Change{"top_p", "0"}, Change{"top_k", "-2"}, Change{"min_p", "2"},
                                 Change{"repetition_penalty", "0"}, Change{"eos_token_id", "[99]"}}) {
        const testing::TempFolder folder;
        folder.write("generation_config.json", std::string("{\"") + change.key + "\": " + change.value + "}");
        ModelConfig config = *parse_model_config(tiny_config());
        const Result<GenerationDefaults> defaults = load_generation_defaults(folder.path(), config);
        ASSERT_FALSE(defaults.ok()) << change.key;
        EXPECT_THAT(defaults.status().message(), HasSubstr("generation_config.json"));
        EXPECT_THAT(defaults.status().message(), HasSubstr(change.key));
    }
}

Result<QuantConfig> quant_of(const std::string& section) {
    return parse_quant_config(*json::parse("{\"quantization_config\": " + section + "}"), "config.json");
}

TEST(QuantConfig, AbsentMeansNone) {
    EXPECT_FALSE(quant_of("null")->fp8);
    EXPECT_FALSE(quant_of("null")->quantises("model.layers.0.self_attn.q_proj"));
}

TEST(QuantConfig, OfficialFormat) {
    const Result<QuantConfig> quant = quant_of(testing::kFp8Section);
    ASSERT_TRUE(quant.ok()) << quant.status().message();
    EXPECT_TRUE(quant->fp8);
    EXPECT_TRUE(quant->static_kv_scales);
    EXPECT_TRUE(quant->quantises("model.layers.0.self_attn.q_proj"));
    EXPECT_TRUE(quant->quantises("model.layers.80.mlp.experts.191.down_proj"));
    EXPECT_FALSE(quant->quantises("lm_head"));
    EXPECT_FALSE(quant->quantises("model.layers.80.eh_proj"));
    EXPECT_FALSE(quant->quantises("model.layers.1.mlp.router.gate"));
}

TEST(QuantConfig, DynamicActivations) {
    const Result<QuantConfig> tensor = quant_of(R"({"quant_method": "fp8", "activation_scheme": "dynamic"})");
    ASSERT_TRUE(tensor.ok()) << tensor.status().message();
    EXPECT_TRUE(tensor->fp8 && tensor->dynamic_inputs);
    EXPECT_FALSE(tensor->fp8_blocks);
    const Result<QuantConfig> blocks =
        quant_of(R"({"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3",
                     "weight_block_size": [128, 128], "modules_to_not_convert": ["model.layers.0.mlp.up_proj"]})");
    ASSERT_TRUE(blocks.ok()) << blocks.status().message();
    EXPECT_TRUE(blocks->fp8 && blocks->dynamic_inputs && blocks->fp8_blocks);
    EXPECT_FALSE(blocks->quantises("model.layers.0.mlp.up_proj"));
    EXPECT_TRUE(blocks->quantises("model.layers.0.mlp.down_proj"));
    EXPECT_FALSE(quant_of(testing::kFp8Section)->dynamic_inputs);
}

TEST(QuantConfig, IgnoredLayersMatchWholeNames) {
    const Result<QuantConfig> quant = quant_of(R"({"quant_method": "fp8", "activation_scheme": "static",
                     "ignored_layers": ["model.layers.1.mlp.shared_experts.gate_proj", "layers.2.self_attn.q_proj"]})");
    ASSERT_TRUE(quant.ok()) << quant.status().message();
    EXPECT_FALSE(quant->quantises("model.layers.1.mlp.shared_mlp.gate_proj"));
    EXPECT_TRUE(quant->quantises("model.layers.11.mlp.shared_mlp.gate_proj"));
    EXPECT_TRUE(quant->quantises("model.layers.2.self_attn.q_proj"));
}

TEST(QuantConfig, RefusesWhatItCannotCompute) {
    const std::pair<const char*, const char*> cases[] = {
        {R"("fp8")", "quantization_config"},
        {R"({})", "quant_method"},
        {R"({"quant_method": "awq", "activation_scheme": "static"})", "awq"},
        {R"({"quant_method": "gptq", "bits": 8, "group_size": 128, "sym": true})", "bits is 8"},
        {R"({"quant_method": "gptq", "bits": 4, "group_size": 64, "sym": true})", "group_size is 64"},
        {R"({"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": false})", "sym is false"},
        {R"({"quant_method": "w4a8_awq", "weight_group_size": 64})", "weight_group_size"},
        {R"({"quant_method": "w4a8_awq", "weight_group_size": 128, "ignored_quantization_config":
            {"quant_method": "fp8", "weight_block_size": [64, 64]}})",
         "weight_block_size"},
        {R"({"quant_method": "compressed-tensors", "format": "pack-quantized"})", "config_groups"},
        {R"({"quant_method": "compressed-tensors", "config_groups": {"a": {"weights": {"num_bits": 4}}}})",
         "input_activations"},
        {R"({"quant_method": "compressed-tensors", "config_groups": {"a": {"weights": {"num_bits": 8},
            "input_activations": {}}}})",
         "config_groups.a: weights: num_bits is 8"},
        {R"({"quant_method": "modelopt", "quant_algo": "NVFP4"})", "quant_algo"},
        {R"({"quant_method": "fp8"})", "activation_scheme"},
        {R"({"quant_method": "fp8", "activation_scheme": "odd"})", "must be \"static\" or \"dynamic\""},
        {R"({"quant_method": "fp8", "activation_scheme": "static", "weight_block_size": [128, 128]})",
         "must be absent (weights in blocks have activation_scheme \"dynamic\")"},
        {R"({"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [64, 64]})",
         "must be [128,128]"},
        {R"({"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": 128})",
         "must be [128,128]"},
        {R"({"quant_method": "fp8", "activation_scheme": "static", "fmt": "e5m2"})", "e4m3"},
        {R"({"quant_method": "fp8", "activation_scheme": "static", "kv_cache_scheme": {"a": 1}})",
         "kv_cache_scheme"},
        {R"({"quant_method": "fp8", "activation_scheme": "static", "ignored_layers": [1]})",
         "ignored_layers"},
    };
    for (const auto& [section, word] : cases) {
        const Result<QuantConfig> quant = quant_of(section);
        ASSERT_FALSE(quant.ok()) << section;
        EXPECT_THAT(quant.status().message(), HasSubstr("config.json: quantization_config"));
        EXPECT_THAT(quant.status().message(), HasSubstr(word));
    }
}

}  // namespace
}  // namespace tessera

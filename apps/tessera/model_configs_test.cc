#include "model_configs.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace tessera {
namespace {

using ::testing::HasSubstr;

TEST(ModelConfigs, Hy3HasThePublishedWidths) {
    const Result<ModelConfig> config = find_model_config("hy3");
    ASSERT_TRUE(config.ok()) << config.status().message();
    EXPECT_EQ(config->vocab_size, 120832);
    EXPECT_EQ(config->hidden_size, 4096);
    EXPECT_EQ(config->q_width(), 8192);
    EXPECT_EQ(config->kv_width(), 1024);
    EXPECT_EQ(config->intermediate_size, 13312);
    EXPECT_EQ(config->num_experts, 192);
    EXPECT_EQ(config->num_experts_per_token, 8);
    EXPECT_EQ(config->shared_width(), 1536);
    EXPECT_EQ(config->num_layers, 80);
    EXPECT_EQ(config->first_k_dense, 1);
    EXPECT_EQ(config->num_mtp_layers, 1);
    EXPECT_EQ(config->max_position_embeddings, 262144);
}

TEST(ModelConfigs, AFileAndItsFolderGiveTheSame) {
    const std::string folder = TESSERA_SOURCE_DIR "/models/demo";
    const Result<ModelConfig> from_folder = find_model_config(folder);
    const Result<ModelConfig> from_file = find_model_config(folder + "/config.json");
    ASSERT_TRUE(from_folder.ok() && from_file.ok());
    EXPECT_EQ(from_folder->hidden_size, 256);
    EXPECT_EQ(from_file->hidden_size, from_folder->hidden_size);
}

TEST(ModelConfigs, AnUnknownNameIsRefusedByName) {
    const Result<ModelConfig> config = find_model_config("hy9");
    ASSERT_FALSE(config.ok());
    EXPECT_THAT(config.status().message(), HasSubstr("hy9"));
}

TEST(ModelConfigs, LayersAreTheFirstOnesWithoutMtp) {
    const ModelConfig hy3 = *find_model_config("hy3");
    const Result<ModelConfig> eight = with_layers(hy3, 8);
    ASSERT_TRUE(eight.ok());
    EXPECT_EQ(eight->num_layers, 8);
    EXPECT_EQ(eight->num_mtp_layers, 0);
    EXPECT_FALSE(eight->is_moe(0));
    EXPECT_TRUE(eight->is_moe(1));
    EXPECT_EQ(with_layers(hy3, 0)->num_layers, 80);
    EXPECT_FALSE(with_layers(hy3, 81).ok());
    EXPECT_FALSE(with_layers(hy3, -1).ok());
}

}  // namespace
}  // namespace tessera

#include "weights/checkpoint/name_map.h"

#include <gtest/gtest.h>

namespace tessera {
namespace {

TEST(NameMap, BothLayoutsGiveOneName) {
    const std::pair<const char*, const char*> cases[] = {
        {"model.layers.1.mlp.gate.weight", "model.layers.1.mlp.router.gate.weight"},
        {"model.layers.1.mlp.gate.wg.weight", "model.layers.1.mlp.router.gate.weight"},
        {"model.layers.1.mlp.router.gate.weight", "model.layers.1.mlp.router.gate.weight"},
        {"model.layers.1.mlp.e_score_correction_bias", "model.layers.1.mlp.expert_bias"},
        {"model.layers.1.mlp.shared_experts.up_proj.weight", "model.layers.1.mlp.shared_mlp.up_proj.weight"},
        {"model.layers.1.mlp.shared_experts.up_proj", "model.layers.1.mlp.shared_mlp.up_proj"},
        {"model.layers.0.mlp.gate_proj.weight", "model.layers.0.mlp.gate_proj.weight"},
        {"model.layers.1.mlp.experts.gate_up_proj", "model.layers.1.mlp.experts.gate_up_proj"},
        {"model.layers.3.self_attn.k_cache.scale", "model.layers.3.self_attn.k_scale"},
        {"model.layers.3.self_attn.v_proj.v_scale", "model.layers.3.self_attn.v_scale"},
        {"model.layers.3.self_attn.attn.k_scale", "model.layers.3.self_attn.k_scale"},
        {"model.layers.3.self_attn.v_scale", "model.layers.3.self_attn.v_scale"},
        {"model.layers.3.self_attn.k_proj.weight_scale", "model.layers.3.self_attn.k_proj.weight_scale"},
        {"something.else", "something.else"},
    };
    for (const auto& [from, to] : cases) {
        EXPECT_EQ(canonical_name(from), to);
        EXPECT_EQ(canonical_name(canonical_name(from)), to);
    }
}

TEST(NameMap, IgnoredTensors) {
    EXPECT_TRUE(is_ignored_tensor("model.layers.80.embed_tokens.weight", 80));
    EXPECT_TRUE(is_ignored_tensor("model.layers.80.shared_head.norm.weight", 80));
    EXPECT_TRUE(is_ignored_tensor("model.layers.80.shared_head_norm.weight", 80));
    EXPECT_TRUE(is_ignored_tensor("model.layers.5.self_attn.rotary_emb.inv_freq", 80));
    EXPECT_FALSE(is_ignored_tensor("model.layers.8.embed_tokens.weight", 80));
    EXPECT_FALSE(is_ignored_tensor("model.embed_tokens.weight", 80));
    EXPECT_FALSE(is_ignored_tensor("model.layers.80.eh_proj.weight", 80));
}

}  // namespace
}  // namespace tessera

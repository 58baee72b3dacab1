#include "engine_cost.h"

#include <gtest/gtest.h>

namespace tessera {
namespace {

// One dense and one MoE layer with sizes that are easy to multiply.
ModelConfig small_config() {
    ModelConfig config;
    config.vocab_size = 1000;
    config.hidden_size = 10;
    config.intermediate_size = 30;
    config.moe_intermediate_size = 5;
    config.num_layers = 2;
    config.num_heads = 4;
    config.num_kv_heads = 2;
    config.head_dim = 8;
    config.num_experts = 6;
    config.num_experts_per_token = 2;
    config.num_shared_experts = 1;
    config.first_k_dense = 1;
    return config;
}

const OperatorCost& cost_of(const OperatorCosts& costs, PassOperator op) {
    return costs[static_cast<size_t>(op)];
}

constexpr PassShape kDecode = {
    .tokens = 3, .logit_rows = 3, .attended = 100, .cached_slots = 100, .experts_touched = 4};

TEST(EngineCost, EveryOperatorHasItsWeightsAndProducts) {
    const OperatorCosts costs = operator_costs(small_config(), kDecode, {.weight = 1, .plain = 2, .kv = 1});
    // qkv: [64, 10] in both layers.
    EXPECT_EQ(cost_of(costs, PassOperator::kQkv).bytes, 2 * 640);
    EXPECT_EQ(cost_of(costs, PassOperator::kQkv).fmas, 3 * 2 * 640);
    EXPECT_EQ(cost_of(costs, PassOperator::kAttentionOut).bytes, 2 * 320);
    // 100 slots of 2 heads of 8, K and V; q k^T and p v for 4 heads.
    EXPECT_EQ(cost_of(costs, PassOperator::kAttention).bytes, 2 * 100 * 2 * 16);
    EXPECT_EQ(cost_of(costs, PassOperator::kAttention).fmas, 2 * 2 * 100 * 32);
    EXPECT_EQ(cost_of(costs, PassOperator::kDenseMlp).bytes, 3 * 10 * 30);
    EXPECT_EQ(cost_of(costs, PassOperator::kRouter).bytes, 2 * 10 * 6);
    // An expert has 150 elements: four touched ones and the shared one.
    EXPECT_EQ(cost_of(costs, PassOperator::kExperts).bytes, 5 * 150);
    EXPECT_EQ(cost_of(costs, PassOperator::kExperts).fmas, 3 * (2 + 1) * 150);
    EXPECT_EQ(cost_of(costs, PassOperator::kHead).bytes, 2 * 10'000);
    EXPECT_EQ(cost_of(costs, PassOperator::kEmbed).bytes, 2 * 3 * 10);
}

TEST(EngineCost, ExpertsMayHaveFewerBytesThanOtherProjections) {
    const auto bytes = [](double expert) {
        const ModelBytes element{.weight = 2, .expert = expert};
        return cost_of(operator_costs(small_config(), kDecode, element), PassOperator::kExperts).bytes;
    };
    const double routed = static_cast<double>(kDecode.experts_touched * 3 * small_config().hidden_size *
                                              small_config().moe_intermediate_size);
    EXPECT_DOUBLE_EQ(bytes(0) - bytes(0.5), 1.5 * routed);
}

TEST(EngineCost, TheHeadCostsNothingWithoutLogits) {
    PassShape shape = kDecode;
    shape.logit_rows = 0;
    const OperatorCosts costs = operator_costs(small_config(), shape, ModelBytes{});
    EXPECT_EQ(cost_of(costs, PassOperator::kHead).bytes, 0);
    EXPECT_EQ(cost_of(costs, PassOperator::kHead).fmas, 0);
}

TEST(EngineCost, APassIsTheSumWithoutActivations) {
    const ModelBytes element{.weight = 2, .plain = 2, .kv = 4, .activation = 2};
    PassCost sum;
    for (const OperatorCost& cost : operator_costs(small_config(), kDecode, element)) {
        sum.fmas += cost.fmas;
        sum.bytes += cost.bytes;
    }
    const PassCost pass = pass_cost(small_config(), kDecode, element);
    EXPECT_EQ(pass.fmas, sum.fmas);
    EXPECT_EQ(pass.bytes, sum.bytes);
    const OperatorCosts costs = operator_costs(small_config(), kDecode, element);
    EXPECT_GT(cost_of(costs, PassOperator::kNorm).activation_bytes, 0);
}

TEST(EngineCost, AFloorIsTheLargerOfBytesAndArithmetic) {
    const PassRates rates{
        .bytes_per_s = 1e6, .fma_per_s = 1e6, .quantised_fma_per_s = 2e6, .attention_fma_per_s = 4e6};
    const OperatorCost bytes{.fmas = 10, .bytes = 30, .activation_bytes = 10};
    EXPECT_DOUBLE_EQ(operator_floor_us(PassOperator::kHead, bytes, rates), 40);
    const OperatorCost fmas{.fmas = 100, .bytes = 30};
    EXPECT_DOUBLE_EQ(operator_floor_us(PassOperator::kHead, fmas, rates), 100);
    EXPECT_DOUBLE_EQ(operator_floor_us(PassOperator::kExperts, fmas, rates), 50);
    EXPECT_DOUBLE_EQ(operator_floor_us(PassOperator::kAttention, fmas, rates), 30);

    OperatorCosts costs{};
    costs[static_cast<size_t>(PassOperator::kHead)] = bytes;
    costs[static_cast<size_t>(PassOperator::kExperts)] = fmas;
    EXPECT_DOUBLE_EQ(pass_floor_us(costs, rates), 60);  // 10 + 50 of arithmetic; 60 bytes
    costs[static_cast<size_t>(PassOperator::kHead)].bytes = 50;
    EXPECT_DOUBLE_EQ(pass_floor_us(costs, rates), 80);
    costs[static_cast<size_t>(PassOperator::kAttention)] = fmas;
    EXPECT_DOUBLE_EQ(pass_floor_us(costs, rates), 110);  // 80 and 30 of bytes; 85 of arithmetic
}

TEST(EngineCost, TouchedExpertsAreTheDistinctChosenOnes) {
    const ModelConfig config = small_config();
    const float logits[] = {9, 8, 0, 0, 0, 0,   // 0 and 1
                            0, 9, 8, 0, 0, 0};  // 1 and 2
    EXPECT_EQ(count_touched_experts(logits, {}, config), 3);
    const float bias[] = {0, 0, 0, 0, 5, 5};  // outweighs any sigmoid
    EXPECT_EQ(count_touched_experts(logits, bias, config), 2);
}

}  // namespace
}  // namespace tessera

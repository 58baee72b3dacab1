#include "ops/router_topk/router_topk.h"

#include <gtest/gtest.h>

#include "ops/op_testing.h"
#include "ops/router_topk/router_topk_cases.h"

namespace tessera {
namespace {

using RouterTopkTest = OpTest;

TEST_F(RouterTopkTest, EveryCaseEqualsTheReferenceOnEveryInstructionSet) {
    expect_reference_bits(router_topk_cases(), false);
}

TEST_F(RouterTopkTest, TheBiasChoosesButDoesNotWeigh) {
    const float logits[4] = {0.0f, 2.0f, 1.0f, -1.0f};
    const float bias[4] = {1.0f, 0.0f, 0.0f, 0.0f};
    int32_t chosen[2] = {};
    float weights[2] = {};
    RouterTopkArgs args{.logits = logits,
                        .logits_stride = 4,
                        .bias = bias,
                        .tokens = 1,
                        .experts = 4,
                        .k = 2,
                        .scale = 2.0f,
                        .chosen = chosen,
                        .weights = weights};
    router_topk(context_, args);
    EXPECT_EQ(chosen[0], 0);
    EXPECT_EQ(chosen[1], 1);
    const double s0 = 0.5;
    const double s1 = 1 / (1 + std::exp(-2.0));
    EXPECT_NEAR(weights[0], 2 * s0 / (s0 + s1), 1e-6);
    EXPECT_NEAR(weights[1], 2 * s1 / (s0 + s1), 1e-6);
    args.normalise = false;
    router_topk(context_, args);
    EXPECT_NEAR(weights[1], 2 * s1, 1e-6);
}

TEST_F(RouterTopkTest, TiesGoToTheLowestIndex) {
    const std::vector<float> logits(8, 0.25f);
    int32_t chosen[3] = {};
    float weights[3] = {};
    router_topk(context_, {.logits = logits.data(),
                           .logits_stride = 8,
                           .tokens = 1,
                           .experts = 8,
                           .k = 3,
                           .chosen = chosen,
                           .weights = weights});
    EXPECT_EQ(chosen[0], 0);
    EXPECT_EQ(chosen[1], 1);
    EXPECT_EQ(chosen[2], 2);
}

}  // namespace
}  // namespace tessera

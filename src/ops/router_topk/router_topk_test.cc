#include "ops/router_topk/router_topk.h"

#include <gtest/gtest.h>

#include "ops/harness_simd.h"
#include "ops/router_topk/router_topk_cases.h"

namespace tessera {
namespace {

class RouterTopkTest : public ::testing::Test {
  protected:
    void TearDown() override { force_simd(0); }

    ThreadPool threads_{3};
    OpContext context_{threads_};
};

TEST_F(RouterTopkTest, EveryCaseEqualsTheReferenceOnEveryInstructionSet) {
    for (const SimdVariant& variant : simd_variants()) {
        if (!variant.supported || variant.name == "reference") {
            continue;
        }
        force_simd(variant.target);
        for (const OpCase& c : router_topk_cases()) {
            if (c.bench) {
                continue;  // the reference takes long; `ops test` runs them
            }
            const OpError error = c.prepare().check(context_);
            EXPECT_GT(error.compared, 0);
            EXPECT_EQ(error.mismatches, 0)
                << variant.name << " " << c.shape << " " << c.dtype << " max_abs=" << error.max_abs;
        }
    }
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

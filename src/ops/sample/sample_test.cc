#include "ops/sample/sample.h"

#include <cmath>
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <limits>
#include <map>
#include <numeric>
#include <string>

#include "ops/op_testing.h"
#include "ops/sample/sample_cases.h"
#include "ops/sample/sample_common.h"

namespace tessera {
namespace {

class SampleTest : public OpTest {
  protected:
    // The token that one row gives.
    SampleRowResult one(const SampleRowArgs& row, int64_t vocab) {
        const SampleWorkspace workspace = SampleWorkspace::create(vocab, 2).take();
        SampleRowResult result;
        sample(context_,
               {.vocab = vocab, .rows = {&row, 1}, .results = {&result, 1}, .workspace = &workspace});
        return result;
    }
};

TEST_F(SampleTest, EveryCaseEqualsTheReferenceOnEveryInstructionSet) {
    expect_reference_bits(sample_cases(), true);
}

TEST_F(SampleTest, ADrawDependsOnSeedPositionAndDistributionAlone) {
    SampleCase data(4096, 40, 4, edit_everything);
    sample(context_, data.args());
    const std::vector<SampleRowResult> together = data.results();
    for (size_t i = 0; i < together.size(); ++i) {
        const SampleRowResult alone = one(data.rows()[i], 4096);
        EXPECT_EQ(alone.token, together[i].token);
        EXPECT_EQ(alone.logprob, together[i].logprob);
    }
    SampleRowArgs row = data.rows()[0];
    row.temperature = 2;
    row.top_k = 0;
    row.top_p = 1;
    row.min_p = 0;
    std::map<int32_t, int> by_seed;
    std::map<int32_t, int> by_position;
    for (uint64_t i = 0; i < 30; ++i) {
        row.seed = i;
        row.position = 0;
        ++by_seed[one(row, 4096).token];
        row.seed = 0;
        row.position = i;
        ++by_position[one(row, 4096).token];
    }
    EXPECT_GT(by_seed.size(), 20u);
    EXPECT_GT(by_position.size(), 20u);
}

TEST_F(SampleTest, PhiloxEqualsItsPublishedVectors) {
    using Words = std::array<uint32_t, 4>;
    EXPECT_EQ(philox({0, 0, 0, 0}, {0, 0}), (Words{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}));
    EXPECT_EQ(philox({~0u, ~0u, ~0u, ~0u}, {~0u, ~0u}),
              (Words{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}));
    EXPECT_EQ(philox({0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}, {0xa4093822, 0x299f31d0}),
              (Words{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}));
}

TEST_F(SampleTest, GreedyTakesTheLowestOfEqualTokens) {
    std::vector<float> logits(100, 1.0f);
    logits[40] = 3;
    logits[77] = 3;
    SampleRowArgs row{.logits = logits.data(), .temperature = 0};
    EXPECT_EQ(one(row, 100).token, 40);
    const std::vector<int32_t> masked = {40};
    row.masked = masked;
    EXPECT_EQ(one(row, 100).token, 77);
}

TEST_F(SampleTest, ABadRowFailsAlone) {
    for (const float poison :
         {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
        for (const int64_t place : {0, 17, 98, 99}) {
            std::vector<float> good(100, 0.0f);
            good[3] = 5;
            good[4] = -std::numeric_limits<float>::infinity();
            std::vector<float> bad = good;
            bad[static_cast<size_t>(place)] = poison;
            const std::vector<SampleRowArgs> rows = {{.logits = good.data(), .temperature = 0},
                                                     {.logits = bad.data(), .temperature = 0},
                                                     {.logits = good.data(), .temperature = 0}};
            std::vector<SampleRowResult> results(3);
            const SampleWorkspace workspace = SampleWorkspace::create(100, 2).take();
            sample(context_, {.vocab = 100, .rows = rows, .results = results, .workspace = &workspace});
            EXPECT_EQ(results[0].token, 3);
            EXPECT_EQ(results[1].error, SampleError::kNotFinite);
            EXPECT_EQ(results[2].token, 3);
        }
    }
    const std::vector<float> dead(50, -std::numeric_limits<float>::infinity());
    EXPECT_EQ(one({.logits = dead.data(), .temperature = 1}, 50).error, SampleError::kNoToken);
}

TEST_F(SampleTest, LogprobsAreOfTheRawLogits) {
    const std::vector<float> logits = {0, 1, 2, 3};
    const std::vector<std::pair<int32_t, float>> bias = {{0, 100.0f}};
    const SampleRowArgs row{
        .logits = logits.data(), .temperature = 0, .logit_bias = bias, .logprobs = true, .top = 2};
    const SampleRowResult result = one(row, 4);
    const double log_sum = std::log(1 + std::exp(1.0) + std::exp(2.0) + std::exp(3.0));
    EXPECT_EQ(result.token, 0);
    EXPECT_NEAR(result.logprob, -log_sum, 1e-6);
    ASSERT_EQ(result.top_count, 2);
    EXPECT_EQ(result.top[0].token, 3);
    EXPECT_NEAR(result.top[0].logprob, 3 - log_sum, 1e-6);
    EXPECT_EQ(result.top[1].token, 2);
}

TEST_F(SampleTest, AForcedTokenIsTakenAndScored) {
    const std::vector<float> logits = {0, 1, 2, 3};
    const SampleRowResult result =
        one({.logits = logits.data(), .temperature = 1, .forced_token = 1, .logprobs = true}, 4);
    EXPECT_EQ(result.token, 1);
    EXPECT_NEAR(result.logprob, 1 - std::log(1 + std::exp(1.0) + std::exp(2.0) + std::exp(3.0)), 1e-6);
    EXPECT_EQ(result.top_count, 0);
}

// Extremes of every control stay defined.
TEST_F(SampleTest, ExtremesGiveAToken) {
    std::vector<float> logits = {-3e38f, 3e38f, 1e-30f, -1e-30f, 0, 5, 3e38f};
    for (const float temperature : {0.0f, 1e-4f, 1.0f, 2.0f}) {
        for (const float repetition : {1e-6f, 2.0f}) {
            std::vector<int32_t> counts(7, 1 << 20);
            const SampleRowArgs row{.logits = logits.data(),
                                    .temperature = temperature,
                                    .top_k = 3,
                                    .top_p = 0.5f,
                                    .min_p = 1,
                                    .repetition_penalty = repetition,
                                    .presence_penalty = -2,
                                    .frequency_penalty = 2,
                                    .output_counts = counts.data()};
            const SampleRowResult result = one(row, 7);
            EXPECT_EQ(result.error, SampleError::kNone);
            EXPECT_EQ(result.token, 1);
        }
    }
}

}  // namespace
}  // namespace tessera

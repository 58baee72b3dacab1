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

    // Chi-square of draws against the definition. The bound is the 1 - 1e-6 quantile, roughly.
    void expect_distribution(const SampleRowArgs& row, int64_t vocab, int64_t draws, const std::string& name);

    // How often each token comes in `draws` draws (output positions 0, 1, ...).
    std::vector<int64_t> histogram(SampleRowArgs row, int64_t vocab, int64_t draws) {
        const SampleWorkspace workspace = SampleWorkspace::create(vocab, 2).take();
        std::vector<SampleRowArgs> rows(static_cast<size_t>(draws), row);
        for (size_t i = 0; i < rows.size(); ++i) {
            rows[i].position = i;
        }
        std::vector<SampleRowResult> results(rows.size());
        sample(context_, {.vocab = vocab, .rows = rows, .results = results, .workspace = &workspace});
        std::vector<int64_t> counts(static_cast<size_t>(vocab));
        for (const SampleRowResult& result : results) {
            EXPECT_EQ(result.error, SampleError::kNone);
            ++counts[static_cast<size_t>(result.token)];
        }
        return counts;
    }
};

TEST_F(SampleTest, EveryCaseEqualsTheReferenceOnEveryInstructionSet) {
    expect_reference_bits(sample_cases(), true);
}

// What vLLM's definitions give, in float64, written without a look at the operator: probabilities of the kept
// tokens after bias, penalties, temperature, min_p, top_k and top_p.
std::vector<double> expected_distribution(const SampleRowArgs& row, int64_t vocab) {
    std::vector<double> x(row.logits, row.logits + vocab);
    for (const auto& [id, bias] : row.logit_bias) {
        x[static_cast<size_t>(id)] += bias;
    }
    for (int64_t i = 0; i < vocab; ++i) {
        double& v = x[static_cast<size_t>(i)];
        const int32_t count = row.output_counts == nullptr ? 0 : row.output_counts[i];
        if (count > 0 || (row.prompt_seen != nullptr && bit_is_set(row.prompt_seen, i))) {
            v = v > 0 ? v / row.repetition_penalty : v * row.repetition_penalty;
        }
        v -= static_cast<double>(row.frequency_penalty) * count + (count > 0 ? row.presence_penalty : 0);
        v /= row.temperature;
    }
    const auto softmax = [&] {
        const double max = *std::max_element(x.begin(), x.end());
        std::vector<double> p;
        for (const double v : x) {
            p.push_back(std::exp(v - max));
        }
        const double sum = std::accumulate(p.begin(), p.end(), 0.0);
        for (double& v : p) {
            v /= sum;
        }
        return p;
    };
    const std::vector<double> p = softmax();
    const double best = *std::max_element(p.begin(), p.end());
    for (size_t i = 0; i < p.size(); ++i) {
        x[i] = p[i] < row.min_p * best ? -INFINITY : x[i];
    }
    if (row.top_k > 0) {
        std::vector<double> sorted = x;
        std::sort(sorted.rbegin(), sorted.rend());
        const double least = sorted[static_cast<size_t>(row.top_k) - 1];
        for (double& v : x) {
            v = v < least ? -INFINITY : v;
        }
    }
    const std::vector<double> q = softmax();
    std::vector<size_t> order(q.size());
    std::iota(order.begin(), order.end(), 0);
    std::sort(order.begin(), order.end(), [&](size_t a, size_t b) { return q[a] > q[b]; });
    double before = 0;
    for (const size_t id : order) {
        x[id] = before >= row.top_p ? -INFINITY : x[id];
        before += q[id];
    }
    return softmax();
}

void SampleTest::expect_distribution(const SampleRowArgs& row, int64_t vocab, int64_t draws,
                                     const std::string& name) {
    const std::vector<double> p = expected_distribution(row, vocab);
    const std::vector<int64_t> seen_counts = histogram(row, vocab, draws);
    double chi_square = 0;
    int degrees = -1;
    for (size_t i = 0; i < p.size(); ++i) {
        const double expected = p[i] * static_cast<double>(draws);
        if (expected < 1e-9) {
            EXPECT_EQ(seen_counts[i], 0) << name << " token " << i << " is not in the support";
            continue;
        }
        const double difference = static_cast<double>(seen_counts[i]) - expected;
        chi_square += difference * difference / std::max(expected, 1.0);
        ++degrees;
    }
    EXPECT_LT(chi_square, degrees + 8 * std::sqrt(2.0 * degrees) + 10) << name;
    EXPECT_GE(degrees, 2);
}

TEST_F(SampleTest, DrawsFollowTheDistribution) {
    const int64_t vocab = 24;
    const int64_t draws = 40'000;
    OpRandom random(7);
    std::vector<float> logits(vocab);
    random.fill(logits, 2);
    const std::vector<uint64_t> seen = {0b1010101};
    std::vector<int32_t> counts(vocab);
    counts[2] = 1;
    counts[3] = 4;
    const std::vector<std::pair<int32_t, float>> bias = {{5, 1.5f}, {9, -100.0f}};
    std::vector<SampleRowArgs> rows(7, {.logits = logits.data(), .seed = 11});
    rows[1].temperature = 0.5f;
    rows[2].top_k = 6;
    rows[3].top_p = 0.7f;
    rows[4] = {.logits = logits.data(),
               .temperature = 1.3f,
               .top_k = 12,
               .top_p = 0.85f,
               .min_p = 0.15f,
               .seed = 12};
    rows[5] = {.logits = logits.data(),
               .repetition_penalty = 1.5f,
               .presence_penalty = 0.4f,
               .frequency_penalty = 0.3f,
               .prompt_seen = seen.data(),
               .output_counts = counts.data(),
               .seed = 13};
    rows[6] = {.logits = logits.data(),
               .temperature = 1.7f,
               .min_p = 0.1f,
               .repetition_penalty = 0.8f,
               .prompt_seen = seen.data(),
               .output_counts = counts.data(),
               .logit_bias = bias,
               .seed = 14};
    for (size_t r = 0; r < rows.size(); ++r) {
        expect_distribution(rows[r], vocab, draws, fmt::format("row {}", r));
    }
}

// Rows of several tiles, the last one short, one without a token, one with a token far above all others.
TEST_F(SampleTest, DrawsOverTilesFollowTheDistribution) {
    const int64_t vocab = 3 * kSampleTile + 100;
    OpRandom random(8);
    std::vector<float> logits(static_cast<size_t>(vocab));
    random.fill(logits, 2);
    std::fill_n(logits.begin() + kSampleTile, kSampleTile, -INFINITY);
    logits[7] = 8;
    std::vector<SampleRowArgs> rows(3, {.logits = logits.data(), .seed = 21});
    rows[1].temperature = 0.6f;
    rows[2].top_p = 0.8f;
    for (size_t r = 0; r < rows.size(); ++r) {
        expect_distribution(rows[r], vocab, 100'000, fmt::format("row {}", r));
    }
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

TEST_F(SampleTest, TopKKeepsTiesAndTopPAlwaysKeepsOne) {
    const std::vector<float> logits = {1, 2, 2, 2, 0};
    const std::vector<int64_t> ties = histogram({.logits = logits.data(), .top_k = 2, .seed = 1}, 5, 3000);
    EXPECT_EQ(ties[0] + ties[4], 0);
    EXPECT_GT(std::min({ties[1], ties[2], ties[3]}), 700);
    const std::vector<int64_t> single =
        histogram({.logits = logits.data(), .top_p = 1e-6f, .seed = 1}, 5, 100);
    EXPECT_EQ(single[1], 100);  // the lowest id among the best
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

// Draws follow the published rules, in their order.
#include "ops/sample/sample_distribution.h"

#include <algorithm>
#include <gtest/gtest.h>
#include <string>
#include <utility>
#include <vector>

#include "ops/op_testing.h"
#include "ops/sample/sample.h"

namespace tessera {
namespace {

class SampleDistribution : public OpTest {
  protected:
    // How often each token comes in `draws` draws (output positions 0, 1, ...).
    std::vector<int64_t> histogram(SampleRowArgs row, int64_t vocab, int64_t draws) {
        std::vector<SampleRowArgs> rows(static_cast<size_t>(draws), row);
        for (size_t i = 0; i < rows.size(); ++i) {
            rows[i].position = i;
        }
        std::vector<int64_t> counts(static_cast<size_t>(vocab));
        for (const int32_t token : draw(rows, vocab)) {
            ++counts[static_cast<size_t>(token)];
        }
        return counts;
    }
    std::vector<int32_t> draw(std::span<const SampleRowArgs> rows, int64_t vocab) {
        const SampleWorkspace workspace = SampleWorkspace::create(vocab, 2).take();
        std::vector<SampleRowResult> results(rows.size());
        sample(context_, {.vocab = vocab, .rows = rows, .results = results, .workspace = &workspace});
        std::vector<int32_t> tokens;
        for (const SampleRowResult& result : results) {
            EXPECT_EQ(result.error, SampleError::kNone);
            tokens.push_back(result.token);
        }
        return tokens;
    }
};

void expect_plausible(std::span<const int64_t> counts, std::span<const double> p, const std::string& name) {
    const ChiSquare result = chi_square(counts, p);
    EXPECT_TRUE(result.plausible()) << name << ": chi-square " << result.statistic << " of " << result.degrees
                                    << " degrees, " << result.outside << " draws outside the support";
    EXPECT_GE(result.degrees, 2) << name;
}

// vLLM's order with one step right behind another.
SampleOrder moved(SampleStep step, SampleStep behind) {
    SampleOrder order = kVllmOrder;
    const auto from = std::find(order.begin(), order.end(), step);
    std::rotate(from, from + 1, std::find(order.begin(), order.end(), behind) + 1);
    return order;
}

// Every order that can be told from vLLM's. (Masks commute with biases, min_p with top_k.)
std::vector<SampleOrder> wrong_orders() {
    using enum SampleStep;
    return {moved(kMasks, kTopK),       moved(kMasks, kTopP),        moved(kBias, kRepetition),
            moved(kBias, kTemperature), moved(kRepetition, kCounts), moved(kCounts, kTemperature),
            moved(kTemperature, kMinP), moved(kTemperature, kTopP),  moved(kMinP, kTopP),
            moved(kTopK, kTopP)};
}

TEST_F(SampleDistribution, EveryKindOfRowFollowsTheRulesAndNoOtherOrder) {
    constexpr int64_t kDraws = 5000;
    const std::vector<SampleOrder> wrong = wrong_orders();
    std::vector<int> told(wrong.size());
    int tied = 0;
    for (const int64_t vocab : {kSampleKindsFewIds, kSampleKindsManyIds}) {
        const std::vector<SampleKind> kinds = sample_kinds(vocab);
        const std::shared_ptr<SampleCase> data = sample_kinds_case(vocab);
        for (size_t i = 0; i < kinds.size(); ++i) {
            const SampleRowArgs& row = data->rows()[i];
            const std::vector<int64_t> counts = histogram(row, vocab, kDraws);
            const std::vector<double> p = expected_distribution(row, vocab);
            expect_plausible(counts, p, kinds[i].name());
            for (size_t w = 0; w < wrong.size(); ++w) {
                told[w] +=
                    chi_square(counts, expected_distribution(row, vocab, wrong[w])).plausible() ? 0 : 1;
            }
            const auto kept = std::count_if(p.begin(), p.end(), [](double v) { return v > 0; });
            tied += kinds[i].top_k > 0 && kept > kinds[i].top_k ? 1 : 0;
        }
    }
    for (size_t w = 0; w < wrong.size(); ++w) {
        EXPECT_GT(told[w], 4) << "order " << w << " is told from vLLM's by few rows";
    }
    EXPECT_GE(tied, 4) << "rows that keep more than k";
}

TEST_F(SampleDistribution, EveryKindOfRowEqualsTheReference) {
    std::vector<OpCase> cases;
    for (const int64_t vocab : {kSampleKindsFewIds, kSampleKindsManyIds}) {
        cases.push_back(sample_case("every kind",
                                    {.vocab = vocab,
                                     .rows = static_cast<int64_t>(sample_kinds(vocab).size()),
                                     .spread = kSampleKindsSpread,
                                     .edit = edit_to_kinds(vocab)},
                                    false));
    }
    expect_reference_bits(cases, false);
}

// Rows of several tiles, the last one short, one without a token, one with a token far above all others.
TEST_F(SampleDistribution, DrawsOverTilesFollowTheRules) {
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
        expect_plausible(histogram(rows[r], vocab, 60'000), expected_distribution(rows[r], vocab),
                         fmt::format("row {}", r));
    }
}

TEST_F(SampleDistribution, TopKKeepsTiesAndTopPAlwaysKeepsOne) {
    const std::vector<float> logits = {1, 2, 2, 2, 0};
    const std::vector<int64_t> ties = histogram({.logits = logits.data(), .top_k = 2, .seed = 1}, 5, 3000);
    EXPECT_EQ(ties[0] + ties[4], 0);
    EXPECT_GT(std::min({ties[1], ties[2], ties[3]}), 700);
    const std::vector<int64_t> single =
        histogram({.logits = logits.data(), .top_p = 1e-6f, .seed = 1}, 5, 100);
    EXPECT_EQ(single[1], 100);  // the lowest id among the best
}

// A model of three tokens' time: what may follow depends on the token before. Drafts are its best tokens by a
// worse model.
constexpr int64_t kDraftVocab = 6;

class DraftModel {
  public:
    explicit DraftModel(uint64_t seed) {
        OpRandom random(seed);
        for (std::vector<float>& logits : tables_) {
            logits.resize(kDraftVocab);
            random.fill(logits, 2);
        }
    }
    // after: the token before; -1: none.
    SampleRowArgs row(int32_t after, uint64_t seed, uint64_t position) const {
        return {.logits = tables_[static_cast<size_t>(after + 1)].data(),
                .temperature = 0.8f,
                .top_k = 5,
                .top_p = 0.95f,
                .seed = seed,
                .position = position};
    }
    int32_t best(int32_t after) const {
        const std::vector<float>& logits = tables_[static_cast<size_t>(after + 1)];
        return static_cast<int32_t>(std::max_element(logits.begin(), logits.end()) - logits.begin());
    }

  private:
    std::array<std::vector<float>, kDraftVocab + 1> tables_;
};

// Rejection sampling of a step's drafts: tokens are drawn at once for all positions, as if the drafts before
// each were right, and those up to the first that is not the draft are taken.
TEST_F(SampleDistribution, DraftsThatTheDrawnTokensMustEqualKeepTheTargetDistribution) {
    constexpr uint64_t kSequences = 20'000;
    constexpr int kTokens = 3;
    const DraftModel target(3);
    const DraftModel drafter(4);
    std::vector<int64_t> counts(kDraftVocab * kDraftVocab * kDraftVocab);
    std::vector<std::vector<int32_t>> sequences(kSequences);
    int64_t first_accepted = 0;
    for (int step = 0; step < kTokens; ++step) {  // at the latest, one token a step
        std::vector<SampleRowArgs> rows;
        std::vector<int32_t> drafts;
        for (uint64_t s = 0; s < kSequences; ++s) {
            int32_t before = sequences[s].empty() ? -1 : sequences[s].back();
            for (int i = 0; i < kTokens; ++i) {
                rows.push_back(target.row(before, s, sequences[s].size() + static_cast<size_t>(i)));
                before = drafter.best(before);
                drafts.push_back(before);
            }
        }
        const std::vector<int32_t> drawn = draw(rows, kDraftVocab);
        for (size_t s = 0; s < kSequences; ++s) {
            for (size_t i = s * kTokens; i < (s + 1) * kTokens && sequences[s].size() < kTokens; ++i) {
                sequences[s].push_back(drawn[i]);
                first_accepted += step == 0 && i == s * kTokens && drawn[i] == drafts[i] ? 1 : 0;
                if (drawn[i] != drafts[i]) {
                    break;
                }
            }
        }
    }
    for (const std::vector<int32_t>& tokens : sequences) {
        ++counts[static_cast<size_t>((tokens[0] * kDraftVocab + tokens[1]) * kDraftVocab + tokens[2])];
    }
    std::vector<std::vector<double>> after;  // by token before + 1
    for (int32_t before = -1; before < kDraftVocab; ++before) {
        after.push_back(expected_distribution(target.row(before, 0, 0), kDraftVocab));
    }
    std::vector<double> p;
    for (size_t a = 0; a < kDraftVocab; ++a) {
        for (size_t b = 0; b < kDraftVocab; ++b) {
            for (size_t c = 0; c < kDraftVocab; ++c) {
                p.push_back(after[0][a] * after[a + 1][b] * after[b + 1][c]);
            }
        }
    }
    expect_plausible(counts, p, "three tokens");
    // As often as min(1, p / q) accepts a draft whose own probability q is 1.
    const double accept = after[0][static_cast<size_t>(drafter.best(-1))];
    EXPECT_GT(accept, 0.02);
    EXPECT_LT(accept, 0.98);
    EXPECT_NEAR(static_cast<double>(first_accepted) / kSequences, accept, 5 * std::sqrt(0.25 / kSequences));
}

}  // namespace
}  // namespace tessera

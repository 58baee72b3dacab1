#include "ops/attention/attention.h"

#include <cmath>
#include <gtest/gtest.h>
#include <set>

#include "ops/attention/attention_cases.h"
#include "ops/op_testing.h"

namespace tessera {
namespace {

using AttentionTest = OpTest;

TEST_F(AttentionTest, EveryCaseEqualsTheReferenceOnEveryInstructionSet) {
    expect_reference_bits(attention_cases(), false);
}

// What a projection fetches for decode: the keys of whole tiles, of the thread that is offered the item.
TEST_F(AttentionTest, ListsEachThreadsKeysOfWholeTiles) {
    AttentionCase data(
        {.shape = {16, 2, 128}, .sequences = std::vector<AttentionCaseSpec::Sequence>(16, {1, 130})});
    const AttentionArgs args = data.args();
    FetchAhead ahead;
    attention_keys_ahead(context_, args, ahead);
    std::set<const std::byte*> expected;
    for (const AttentionSequence& s : data.sequences()) {
        for (size_t tile = 0; tile < 2; ++tile) {  // of 131 slots
            for (int64_t head = 0; head < 2; ++head) {
                expected.insert(args.pool + s.pages[tile] * args.page_stride + args.k_offset +
                                head * 64 * 128 * 4);
            }
        }
    }
    for (int thread = 0; thread < 2; ++thread) {
        int taken = 0;
        for (; const std::byte* block = ahead.take(thread); ++taken) {
            EXPECT_EQ(expected.erase(block), 1u);
        }
        EXPECT_EQ(taken, 32);
    }
    EXPECT_TRUE(expected.empty());
}

TEST_F(AttentionTest, APromptFetchesNothingAhead) {
    AttentionCase data({.shape = {16, 2, 128}, .sequences = {{64, 0}}});
    FetchAhead ahead;
    attention_keys_ahead(context_, data.args(), ahead);
    EXPECT_EQ(ahead.take(0), nullptr);
}

// The reference itself, against a softmax in float64 that knows nothing of tiles.
TEST_F(AttentionTest, TheReferenceIsSoftmaxAttention) {
    AttentionCase data({.shape = {4, 2, 32}, .sequences = {{30, 1100}, {7, 0, 1}}});
    const AttentionArgs args = data.args();
    attention_ref(args);
    const int64_t d_count = 32;
    for (const AttentionSequence& s : data.sequences()) {
        for (int32_t i = 0; i < s.q_len; ++i) {
            for (int64_t head = 0; head < 4; ++head) {
                const float* q = args.q + (s.first + i) * args.q_stride + head * d_count;
                const auto at = [&](int64_t offset, int32_t slot) {
                    const std::byte* page =
                        args.pool + s.pages[static_cast<size_t>(slot / 64)] * args.page_stride;
                    return reinterpret_cast<const float*>(page + offset) +
                           (head / 2 * 64 + slot % 64) * d_count;
                };
                std::vector<double> out(static_cast<size_t>(d_count), 0.0);
                double sum = 0;
                for (int32_t slot = s.first_slot; slot <= s.first_slot + s.position + i; ++slot) {
                    double score = 0;
                    for (int64_t d = 0; d < d_count; ++d) {
                        score += static_cast<double>(q[d]) * at(args.k_offset, slot)[d];
                    }
                    const double p = std::exp(score / std::sqrt(32.0));
                    sum += p;
                    for (int64_t d = 0; d < d_count; ++d) {
                        out[static_cast<size_t>(d)] += p * at(args.v_offset, slot)[d];
                    }
                }
                const float* got = args.out + (s.first + i) * args.out_stride + head * d_count;
                for (int64_t d = 0; d < d_count; ++d) {
                    ASSERT_NEAR(got[d], out[static_cast<size_t>(d)] / sum, 2e-6);
                }
            }
        }
    }
}

// One sequence of 1,300 tokens: whole, in chunks, and token by token, on one thread and many, split and not.
TEST_F(AttentionTest, ChunkingCompanyAndThreadsChangeNoBit) {
    const int32_t length = 1300;
    AttentionCase data({.shape = {8, 1, 64}, .sequences = {{length, 0}, {3, 500}}});
    attention(context_, data.args());
    const std::vector<float> whole = data.out();

    int split = 0;
    int unsplit = 0;
    for (const int32_t chunk : {1, 7, 64, 1000}) {
        for (const int threads : {1, 2, 5}) {
            ThreadPool pool(threads);
            OpContext context{pool};
            std::vector<float> out(whole.size());
            for (int32_t begin = chunk == 1 ? length - 90 : 0; begin < length; begin += chunk) {
                AttentionSequence part = data.sequences()[0];
                part.first = begin;
                part.position = begin;
                part.q_len = std::min(chunk, length - begin);
                AttentionPlan plan;
                plan.build({8, 1, 64}, std::span(&part, 1), threads);
                split += plan.merges().empty() ? 0 : 1;
                unsplit += plan.merges().empty() ? 1 : 0;
                attention(context, data.args_for(plan, data.q().data(), out.data()));
                const int64_t row = data.row_floats();
                const OpError error = compare(std::span(out).subspan(static_cast<size_t>(begin * row),
                                                                     static_cast<size_t>(part.q_len * row)),
                                              std::span(whole).subspan(static_cast<size_t>(begin * row),
                                                                       static_cast<size_t>(part.q_len * row)),
                                              0);
                ASSERT_EQ(error.mismatches, 0)
                    << "chunk " << chunk << " threads " << threads << " at " << begin;
            }
        }
    }
    EXPECT_GT(split, 0);
    EXPECT_GT(unsplit, 0);
}

// Unwritten slots hold NaN in these cases; one that was read would show.
TEST_F(AttentionTest, NeverReadsUnwrittenSlots) {
    for (const int32_t position : {0, 1, 5, 62, 63, 64, 127, 128}) {
        for (const int32_t first_slot : {0, 1}) {
            AttentionCase data({.sequences = {{3, position, first_slot}}});
            attention(context_, data.args());
            for (const float value : data.out()) {
                ASSERT_TRUE(std::isfinite(value)) << position << " " << first_slot;
            }
        }
    }
}

TEST_F(AttentionTest, ABrokenSequenceLeavesTheOthersAlone) {
    AttentionCase data({.sequences = {{4, 60}, {4, 60}}});
    attention(context_, data.args());
    const std::vector<float> before = data.out();
    std::vector<float> q(data.q().begin(), data.q().end());
    std::fill_n(q.begin(), 4 * data.row_floats(), std::numeric_limits<float>::quiet_NaN());
    AttentionPlan plan;
    plan.build({16, 2, 128}, data.sequences(), 2);
    attention(context_, data.args_for(plan, q.data(), data.out().data()));
    const size_t half = before.size() / 2;
    EXPECT_TRUE(std::isnan(data.out()[0]));
    EXPECT_EQ(compare(std::span(data.out()).subspan(half), std::span(before).subspan(half), 0).mismatches, 0);
}

TEST(AttentionPlanTest, LongestFirstAndEveryQueryOnce) {
    const std::vector<int32_t> pages(40, 0);
    const std::vector<AttentionSequence> sequences = {
        {.first = 0, .q_len = 100, .position = 0, .pages = pages},
        {.first = 100, .q_len = 1, .position = 2000, .pages = pages},
        {.first = 101, .q_len = 30, .position = 900, .first_slot = 1, .pages = pages},
    };
    AttentionPlan plan;
    plan.build({16, 2, 128}, sequences, 4);
    std::vector<int> seen(131 * 2);
    int64_t last = plan.items()[0].cost;
    for (const AttentionItem& item : plan.items()) {
        EXPECT_LE(item.cost, last);
        last = item.cost;
        EXPECT_LE(item.span, 0) << "no item of this batch is worth splitting";
        for (int32_t i = 0; i < item.queries; ++i) {
            const int32_t token = sequences[static_cast<size_t>(item.sequence)].first + item.query + i;
            ++seen[static_cast<size_t>(token * 2 + item.kv_head)];
        }
    }
    EXPECT_EQ(std::count(seen.begin(), seen.end(), 1), 131 * 2);
}

}  // namespace
}  // namespace tessera

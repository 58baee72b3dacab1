// What the cases of sample do not reach: the slots' state over several steps.
#include <gtest/gtest.h>
#include <limits>

#include "device/cuda/graph.h"
#include "device/cuda/stream.h"
#include "ops/sample/cuda/sample_cuda_cases.h"

namespace tessera {
namespace {

constexpr int64_t kVocab = 1000;

class SampleCuda : public testing::Test {
  protected:
    std::unique_ptr<SampleCudaCase> make(int64_t rows, const SampleCase::Edit& edit) {
        host_ = std::make_shared<SampleCase>(kVocab, rows, 5.0f, edit);
        return std::make_unique<SampleCudaCase>(CudaCaseData{budget_}, host_);
    }
    std::vector<SampleRowResult> step(SampleCudaCase& data) {
        data.launch(stream_.get(), 0);
        return data.results();
    }

    MemoryBudget budget_{int64_t{1} << 30};
    Stream stream_;
    std::shared_ptr<SampleCase> host_;
};

void plain(SampleRowArgs& row, OpRandom&, SampleCase&) {
    row.temperature = 1;
    row.frequency_penalty = 0.5f;
}

// The best token is made again and again: its count is read, not only the bit that it was made.
void repetitive(SampleRowArgs& row, OpRandom&, SampleCase&) {
    row.temperature = 0;
    row.frequency_penalty = 0.001f;
    row.repetition_penalty = 1.001f;
}

// One of few tokens each time: whether it was made before is known when it is drawn.
void cut(SampleRowArgs& row, OpRandom&, SampleCase&) {
    row.temperature = 2;
    row.top_k = 3;
    row.frequency_penalty = 0.2f;
    row.repetition_penalty = 1.1f;
}

TEST_F(SampleCuda, StepsOfOneGraphFollowTheReference) {
    constexpr int64_t kTokens = 3000;
    for (const SampleCase::Edit& edit :
         {SampleCase::Edit(plain), SampleCase::Edit(repetitive), SampleCase::Edit(cut)}) {
        for (const size_t rows : {7, 20, 140}) {
            host_ = std::make_shared<SampleCase>(kTokens, static_cast<int64_t>(rows), 5.0f, edit);
            SampleCudaCase data({budget_}, host_);
            const Graph graph = Graph::capture(stream_.get(), [&] { data.launch(stream_.get(), 0); });
            std::vector<std::vector<int32_t>> counts(rows, std::vector<int32_t>(kTokens));
            for (int n = 0; n < 12; ++n) {
                graph.launch(stream_.get());
                const std::vector<SampleRowResult> got = data.results();
                for (size_t r = 0; r < rows; ++r) {
                    host_->rows()[r].output_counts = counts[r].data();
                }
                sample_ref(host_->args());
                for (size_t r = 0; r < rows; ++r) {
                    const int32_t token = host_->results()[r].token;
                    EXPECT_EQ(got[r].token, token) << "step " << n << " row " << r << " of " << rows;
                    ++counts[r][static_cast<size_t>(token)];
                    ++host_->rows()[r].position;
                }
            }
        }
    }
}

// Rows of all kinds beside each other, at one output position after the other: all in one launch, and in
// launches for few rows. Each time with the histories of the begin, so that a row has one distribution.
TEST_F(SampleCuda, DrawsOfEveryKindOfRowFollowTheRules) {
    constexpr int kDraws = 5000;
    for (const int64_t vocab : {kSampleKindsFewIds, kSampleKindsManyIds}) {
        host_ = sample_kinds_case(vocab);
        SampleCudaCase data({budget_}, host_);
        for (SampleSlot& slot : data.host_slots()) {  // stop ids stay masked
            slot.min_tokens = slot.stop_count > 0 ? slot.outputs + kDraws : 0;
        }
        data.slots().upload(data.host_slots());
        const SampleCudaArgs all = data.args(0);
        const auto rows = static_cast<size_t>(all.rows);
        std::vector<std::vector<int64_t>> counts(rows, std::vector<int64_t>(static_cast<size_t>(vocab)));
        for (int n = 0; n < kDraws; ++n) {
            data.reset_histories();
            const int64_t some = n % 2 == 0 ? all.rows : kSampleFewRows;
            for (int64_t first = 0; first < all.rows; first += some) {
                SampleCudaArgs args = all;
                args.rows = std::min(some, all.rows - first);
                args.logits += first * vocab;
                args.row_slots += first;
                args.allowed += first * ((vocab + 31) / 32);
                args.results += first;
                sample_cuda(stream_.get(), args);
            }
            const std::vector<SampleRowResult> got = data.results();
            for (size_t r = 0; r < rows; ++r) {
                ASSERT_EQ(got[r].error, SampleError::kNone) << "row " << r << " of " << vocab << " ids";
                ++counts[r][static_cast<size_t>(got[r].token)];
            }
        }
        const std::vector<SampleKind> kinds = sample_kinds(vocab);
        for (size_t r = 0; r < rows; ++r) {
            const ChiSquare result = chi_square(counts[r], expected_distribution(host_->rows()[r], vocab));
            EXPECT_TRUE(result.plausible()) << kinds[r].name() << ": " << result.statistic << " of "
                                            << result.degrees << ", " << result.outside << " outside";
        }
        EXPECT_EQ(data.slots().download()[0].outputs, data.host_slots()[0].outputs + kDraws);
    }
}

TEST_F(SampleCuda, ARowWithNaNFailsAlone) {
    for (const float bad :
         {std::numeric_limits<float>::quiet_NaN(), std::numeric_limits<float>::infinity()}) {
        host_ = std::make_shared<SampleCase>(kVocab, 3, 5.0f, plain);
        const_cast<float*>(host_->rows()[1].logits)[kVocab - 1] = bad;
        SampleCudaCase data({budget_}, host_);
        const std::vector<SampleRowResult> got = step(data);
        EXPECT_EQ(got[0].error, SampleError::kNone);
        EXPECT_EQ(got[1].error, SampleError::kNotFinite);
        EXPECT_EQ(got[1].token, -1);
        EXPECT_EQ(got[2].error, SampleError::kNone);
        const std::vector<SampleSlot> slots = data.slots().download();
        EXPECT_EQ(slots[1].outputs, static_cast<int32_t>(host_->rows()[1].position));
        EXPECT_EQ(slots[2].outputs, static_cast<int32_t>(host_->rows()[0].position) + 1);
    }
}

TEST_F(SampleCuda, ForcedTokensComeInTheirTurn) {
    auto data = make(1, [](SampleRowArgs& row, OpRandom&, SampleCase&) {
        row.temperature = 0;
        row.forced_token = 17;  // makes the slot's list
    });
    for (int n = 0; n < 2; ++n) {
        const int32_t token = step(*data)[0].token;
        EXPECT_EQ(token == 17, n == 0) << "step " << n;
    }
}

TEST_F(SampleCuda, AStopTokenGivesWayToTheAwaitedToken) {
    auto data = make(1, [](SampleRowArgs& row, OpRandom&, SampleCase&) {
        row.temperature = 0;
        row.forced_token = 17;
        row.logprobs = true;
    });
    const int32_t best = [&] {
        const float* logits = host_->rows()[0].logits;
        return static_cast<int32_t>(std::max_element(logits, logits + kVocab) - logits);
    }();
    SampleSlot& slot = data->host_slots()[0];
    slot.forced_next = -1;
    slot.forced_after = 23;
    slot.stop_count = 1;
    slot.stop_ids[0] = best;
    data->slots().upload(data->host_slots());
    EXPECT_EQ(step(*data)[0].token, 23);    // in place of the stop token
    EXPECT_EQ(step(*data)[0].token, 17);    // forced
    EXPECT_EQ(step(*data)[0].token, best);  // free
}

TEST_F(SampleCuda, StopIdsAreMaskedBeforeTheMinimum) {
    auto data = make(1, [](SampleRowArgs& row, OpRandom&, SampleCase&) { row.temperature = 0; });
    const int32_t best = step(*data)[0].token;
    SampleSlot& slot = data->host_slots()[0];
    slot.stop_count = 1;
    slot.stop_ids[0] = best;
    slot.min_tokens = 2;
    data->slots().upload(data->host_slots());
    EXPECT_NE(step(*data)[0].token, best);
    EXPECT_NE(step(*data)[0].token, best);
    EXPECT_EQ(step(*data)[0].token, best);
}

TEST_F(SampleCuda, HistoryIsSetForOneSlot) {
    auto data = make(3, plain);
    const std::vector<int32_t> prompt{3, 64, 999, 3};
    const std::vector<int32_t> output{5, 5, 0};
    const DeviceArray<int32_t> d_prompt(budget_, prompt, 1);
    const DeviceArray<int32_t> d_output(budget_, output, 1);
    constexpr size_t kWords = (kVocab + 63) / 64;
    const DeviceArray<uint64_t> seen(budget_, std::vector<uint64_t>(3 * kWords, ~uint64_t{0}), 1);
    const DeviceArray<int32_t> counts(budget_, std::vector<int32_t>(3 * kVocab, 9), 1);
    const DeviceArray<uint64_t> made(budget_, std::vector<uint64_t>(3 * kWords, ~uint64_t{0}), 1);
    const DeviceArray<uint64_t> often(budget_, std::vector<uint64_t>(3 * kWords, ~uint64_t{0}), 1);
    SampleSlots slots;
    slots.prompt_seen = seen.at(0);
    slots.output_seen = made.at(0);
    slots.output_often = often.at(0);
    slots.output_counts = counts.at(0);
    sample_history_cuda(stream_.get(), {.slots = slots,
                                        .vocab = kVocab,
                                        .slot = 1,
                                        .prompt = d_prompt.at(0),
                                        .prompt_count = 4,
                                        .output = d_output.at(0),
                                        .output_count = 3});
    const std::vector<uint64_t> got_seen = seen.download();
    const std::vector<uint64_t> got_made = made.download();
    EXPECT_EQ(got_made[kWords - 1], ~uint64_t{0});
    EXPECT_EQ(got_made[kWords], uint64_t{0x21});  // 5 and 0
    EXPECT_EQ(got_made[kWords + 1], uint64_t{0});
    const std::vector<uint64_t> got_often = often.download();
    EXPECT_EQ(got_often[kWords - 1], ~uint64_t{0});
    EXPECT_EQ(got_often[kWords], uint64_t{0x20});  // 5
    EXPECT_EQ(got_often[kWords + 1], uint64_t{0});
    EXPECT_EQ(got_often[2 * kWords], ~uint64_t{0});
    EXPECT_EQ(got_made[2 * kWords], ~uint64_t{0});
    const std::vector<int32_t> got_counts = counts.download();
    EXPECT_EQ(got_seen[kWords - 1], ~uint64_t{0});
    EXPECT_EQ(got_seen[kWords], uint64_t{8});
    EXPECT_EQ(got_seen[kWords + 1], uint64_t{1});
    EXPECT_EQ(got_seen[2 * kWords - 1], uint64_t{1} << (999 % 64));
    EXPECT_EQ(got_seen[2 * kWords], ~uint64_t{0});
    EXPECT_EQ(got_counts[kVocab - 1], 9);
    EXPECT_EQ(got_counts[kVocab], 1);
    EXPECT_EQ(got_counts[kVocab + 5], 2);
    EXPECT_EQ(got_counts[kVocab + 6], 0);
    EXPECT_EQ(got_counts[2 * kVocab], 9);
}

// Every kind of row, a failed one too, leaves zeros where the kernel for few rows needs them.
TEST_F(SampleCuda, TheExchangeIsClearAfterwards) {
    for (const int64_t rows : {40, 16, 6}) {
        host_ = std::make_shared<SampleCase>(3000, rows, 5.0f, edit_everything);
        const_cast<float*>(host_->rows()[5].logits)[2999] = std::numeric_limits<float>::quiet_NaN();
        SampleCudaCase data({budget_}, host_);
        for (int n = 0; n < 3; ++n) {
            step(data);
            EXPECT_TRUE(data.exchange_is_clear()) << rows << " rows, step " << n;
        }
    }
}

// About as many rows as an H200 has multiprocessors, and half as many; every kind of row.
TEST_F(SampleCuda, WholeRowsFollowTheReference) {
    for (const auto& [vocab, rows] :
         {std::pair<int64_t, int64_t>{17000, 110}, {16384, 132}, {33000, 54}, {118000, 60}}) {
        const auto host = std::make_shared<SampleCase>(vocab, rows, 5.0f, edit_everything);
        const_cast<float*>(host->rows()[3].logits)[vocab - 1] = std::numeric_limits<float>::quiet_NaN();
        SampleCudaCase data({budget_}, host);
        for (int n = 0; n < 2; ++n) {
            EXPECT_EQ(data.check(stream_.get()).mismatches, 0) << vocab << " x " << rows;
            EXPECT_TRUE(data.exchange_is_clear());
        }
    }
}

// Few rows, and more of them, after each other in one exchange: near-certain tokens, whose log-probability is
// all that the order of a sum could change.
TEST_F(SampleCuda, LogProbabilitiesHaveTheSameBitsInAnyBatch) {
    for (const int64_t vocab : {int64_t{4096}, int64_t{33000}}) {
        host_ =
            std::make_shared<SampleCase>(vocab, 132, 4.0f, [](SampleRowArgs& row, OpRandom&, SampleCase&) {
                row.temperature = 0;
                row.logprobs = true;
                row.top = 5;
            });
        for (const SampleRowArgs& row : host_->rows()) {
            const_cast<float*>(row.logits)[vocab / 3] = 25;
        }
        SampleCudaCase data({budget_}, host_);
        const std::vector<SampleRowResult> all = step(data);
        for (const int64_t rows : {1, 3, 8, 16, 17, 40, 54, 64, 110}) {
            SampleCudaArgs args = data.args(0);
            args.rows = rows;
            sample_cuda(stream_.get(), args);
            const std::vector<SampleRowResult> got = data.results();
            for (size_t r = 0; r < static_cast<size_t>(rows); ++r) {
                EXPECT_EQ(got[r].logprob, all[r].logprob) << vocab << " x " << rows << ", row " << r;
                for (size_t t = 0; t < 5; ++t) {
                    EXPECT_EQ(got[r].top[t].logprob, all[r].top[t].logprob)
                        << vocab << " x " << rows << ", row " << r;
                }
            }
        }
    }
}

TEST_F(SampleCuda, PaddingRowsAreLeftAlone) {
    auto data = make(2, plain);
    const DeviceArray<int32_t> row_slots(budget_, std::vector<int32_t>{-1, 0}, 1);
    const DeviceArray<SampleRowResult> results(
        budget_, std::vector<SampleRowResult>(2, SampleRowResult{.token = 77}), 1);
    SampleCudaArgs args = data->args(0);
    args.row_slots = row_slots.at(0);
    args.results = results.at(0);
    sample_cuda(stream_.get(), args);
    const std::vector<SampleRowResult> got = results.download();
    EXPECT_EQ(got[0].token, 77);
    EXPECT_NE(got[1].token, -1);
    EXPECT_EQ(data->slots().download()[1].outputs, data->host_slots()[1].outputs);
}

}  // namespace
}  // namespace tessera

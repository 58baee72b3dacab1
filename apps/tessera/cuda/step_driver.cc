#include "step_driver.h"

#include <algorithm>
#include <numeric>

#include "base/check.h"
#include "base/median.h"

namespace tessera {
namespace {

constexpr int32_t kWarmUpSteps = 3;
constexpr int32_t kProbeReplays = 15;

void add(StepProbe& sum, const StepProbe& probe) {
    sum.step_us += probe.step_us;
    sum.marked_us += probe.marked_us;
    // Chunks touch the same experts: a prompt's floor reads each once.
    sum.experts_touched = std::max(sum.experts_touched, probe.experts_touched);
    for (size_t op = 0; op < kPassOperators; ++op) {
        sum.operators[op] += probe.operators[op];
    }
}

// Greedy, and never at an end.
SamplingParams greedy() {
    SamplingParams params;
    params.temperature = 0;
    params.max_tokens = 1 << 20;
    params.ignore_eos = true;
    return params;
}

}  // namespace

StepDriver::StepDriver(CudaRunner& runner, int64_t vocab)
    : runner_(runner), vocab_(vocab), random_(1), pages_(static_cast<size_t>(runner.num_pages())) {
    std::iota(pages_.begin(), pages_.end(), 0);
    for (size_t i = pages_.size(); i > 1; --i) {
        std::swap(pages_[i - 1], pages_[static_cast<size_t>(random_.below(static_cast<int64_t>(i)))]);
    }
}

int64_t StepDriver::decode_pages(int32_t batch, int32_t context, int32_t steps) {
    return int64_t{batch} * ((context + steps) / kPageTokens + 1);
}

int64_t StepDriver::prefill_pages(int32_t tokens) {
    return (tokens + kPageTokens - 1) / kPageTokens;
}

void StepDriver::launch(StepPlan plan) {
    plan.step = ++step_;
    plan.token_count = 0;
    for (const StepRow& row : plan.rows) {
        plan.token_count += row.q_len_max;
    }
    runner_.launch(std::move(plan));
}

StepTiming StepDriver::collect() {
    for (const RowResult& row : runner_.collect().rows) {
        check(row.error.empty(), "bench engine: a row failed: " + row.error);
    }
    return runner_.last_timing();
}

std::vector<PageId> StepDriver::take_pages(int64_t count) {
    check(pages_taken_ + static_cast<size_t>(count) <= pages_.size(),
          "bench engine: more pages than there are");
    const auto begin = pages_.begin() + static_cast<std::ptrdiff_t>(pages_taken_);
    pages_taken_ += static_cast<size_t>(count);
    return {begin, begin + count};
}

// New tenants of the slots [0, count), each with one row that computes the token at `position`.
StepPlan StepDriver::tenants(int32_t count, int32_t position, int64_t pages_each) {
    ++generation_;
    pages_taken_ = 0;
    StepPlan plan;
    for (SlotId slot = 0; slot < count; ++slot) {
        plan.inits.push_back({.slot = slot, .generation = generation_, .sampling = greedy()});
        plan.rows.push_back({.slot = slot,
                             .generation = generation_,
                             .kind = RowKind::kPrefillLast,
                             .q_len_max = 1,
                             .position_lower = position,
                             .position_upper = position,
                             .tokens = {static_cast<TokenId>(random_.below(vocab_))},
                             .new_pages = take_pages(pages_each)});
    }
    return plan;
}

StepPlan StepDriver::decode_plan(int32_t batch, int32_t position) const {
    StepPlan plan;
    for (SlotId slot = 0; slot < batch; ++slot) {
        plan.rows.push_back({.slot = slot,
                             .generation = generation_,
                             .position_lower = position,
                             .position_upper = position});
    }
    return plan;
}

Result<DrivenSteps> StepDriver::decode(int32_t batch, int32_t context, int32_t steps) {
    const int32_t begin = std::max(1, context - steps / 2);
    const int64_t pages_each = decode_pages(1, context, steps);
    StepPlan first = tenants(batch, begin - 1, pages_each);
    launch(std::move(first));
    DrivenSteps out;
    std::vector<double> us;
    for (int32_t i = 0; i < steps; ++i) {
        StepPlan plan = decode_plan(batch, begin + i);
        for (StepRow& row : plan.rows) {
            row.page_table_length = static_cast<int32_t>(pages_each);
        }
        launch(std::move(plan));
        const StepTiming timing = collect();  // of the step before
        if (i > kWarmUpSteps || i == steps - 1) {
            us.push_back(timing.busy_us);
            out.gap_us = std::max(out.gap_us, timing.gap_us);
        }
    }
    collect();
    out.us = median(us);
    Result<StepProbe> probe = runner_.probe(kProbeReplays);
    if (!probe.ok()) {
        return probe.status();
    }
    out.probe = probe.take();
    out.probed = true;
    return out;
}

Result<DrivenSteps> StepDriver::prefill(const DrivenPrefill& prefill) {
    DrivenSteps out;
    std::vector<double> us;
    const int32_t chunks = (prefill.tokens + prefill.chunk - 1) / prefill.chunk;
    // The first round warms up; the last one probes after each chunk, and is not timed.
    const int32_t rounds = prefill.rounds + 1 + (prefill.probe_replays > 0 ? 1 : 0);
    for (int32_t round = 0; round < rounds; ++round) {
        const bool probing = round > prefill.rounds;
        StepPlan plan = tenants(1, 0, prefill_pages(prefill.tokens));
        double sum = 0;
        const auto take_timing = [&](int32_t chunk) {
            const StepTiming timing = collect();
            sum += timing.busy_us + (chunk > 0 ? timing.gap_us : 0.0);
        };
        for (int32_t chunk = 0; chunk < chunks; ++chunk) {
            StepRow& row = plan.rows.front();
            const int32_t position = chunk * prefill.chunk;
            row.q_len_max = std::min(prefill.chunk, prefill.tokens - position);
            row.kind = chunk + 1 == chunks ? RowKind::kPrefillLast : RowKind::kPrefill;
            row.position_lower = position;
            row.position_upper = position;
            row.tokens.clear();
            for (int32_t i = 0; i < row.q_len_max; ++i) {
                row.tokens.push_back(static_cast<TokenId>(random_.below(vocab_)));
            }
            launch(plan);
            row.page_table_length += static_cast<int32_t>(row.new_pages.size());
            row.new_pages.clear();
            plan.inits.clear();
            if (probing) {
                collect();
                Result<StepProbe> probe = runner_.probe(prefill.probe_replays);
                if (!probe.ok()) {
                    return probe.status();
                }
                add(out.probe, *probe);
                out.probed = true;
            } else if (chunk > 0) {
                take_timing(chunk - 1);
            }
        }
        if (!probing) {
            take_timing(chunks - 1);
            if (round > 0) {
                us.push_back(sum);
            }
        }
    }
    out.us = median(us);
    return out;
}

}  // namespace tessera

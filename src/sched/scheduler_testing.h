// What the scheduler's tests share: a scheduler with its cache, and a runner's part played by hand.
#pragma once

#include <algorithm>
#include <gtest/gtest.h>
#include <numeric>
#include <string>
#include <vector>

#include "sched/scheduler.h"

namespace tessera {

inline constexpr TokenId kTestEos = 2;

inline std::vector<TokenId> prompt_of(int32_t tokens, TokenId first = 100) {
    std::vector<TokenId> ids(static_cast<size_t>(tokens));
    std::iota(ids.begin(), ids.end(), first);
    return ids;
}

inline Request request_of(RequestId id, std::vector<TokenId> prompt, int32_t max_tokens) {
    Request request;
    request.id = id;
    request.prompt = std::move(prompt);
    request.sampling.max_tokens = max_tokens;
    return request;
}

class SchedulerRig {
  public:
    explicit SchedulerRig(int32_t pages, const SchedulerConfig& config)
        : cache(pages), scheduler(config, cache) {}

    static SchedulerConfig config() {
        SchedulerConfig config;
        config.max_num_seqs = 4;
        config.max_num_batched_tokens = 64;
        config.max_model_len = 1000;
        config.eos_ids = {kTestEos};
        return config;
    }

    void submit(Request request) { scheduler.submit(std::move(request), now); }

    StepPlan plan() {
        auto made = scheduler.next(now);
        EXPECT_TRUE(made.has_value()) << "no plan";
        scheduler.check_integrity();
        return made.value_or(StepPlan());
    }

    // The plan's result: rows that sample bring `tokens` each, at most as many as the row may.
    static StepResult result_of(const StepPlan& plan, const std::vector<TokenId>& tokens = {7}) {
        StepResult result;
        result.step = plan.step;
        for (const StepRow& row : plan.rows) {
            RowResult& out = result.rows.emplace_back();
            out.slot = row.slot;
            out.generation = row.generation;
            const size_t most = row.kind == RowKind::kPrefill ? 0 : static_cast<size_t>(1 + row.draft_count);
            for (size_t i = 0; i < std::min(most, tokens.size()); ++i) {
                out.tokens.push_back({.token = tokens[i], .logprob = -0.5F, .top = {}});
            }
        }
        return result;
    }

    std::vector<TokenEvent> commit(const StepResult& result) {
        scheduler.commit(result, now);
        scheduler.check_integrity();
        cache.check_integrity();
        return scheduler.take_events();
    }

    std::vector<TokenEvent> step(const std::vector<TokenId>& tokens = {7}) {
        const StepPlan made = plan();
        return commit(result_of(made, tokens));
    }

    // Steps until nothing is left; the events of all.
    std::vector<TokenEvent> run(const std::vector<TokenId>& tokens = {7}) {
        std::vector<TokenEvent> all;
        while (scheduler.has_work()) {
            for (TokenEvent& event : step(tokens)) {
                all.push_back(std::move(event));
            }
        }
        return all;
    }

    KvCache cache;
    Scheduler scheduler;
    TimeNs now = 1;
};

}  // namespace tessera

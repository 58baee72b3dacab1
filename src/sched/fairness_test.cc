// Several requests share the steps: who gets how much of a step's budget, and in which order they come in.
#include <gtest/gtest.h>
#include <map>

#include "sched/internal/step_budget.h"
#include "sched/scheduler_testing.h"

namespace tessera {
namespace {

std::map<RowKind, int32_t> tokens_by_kind(const StepPlan& plan) {
    std::map<RowKind, int32_t> tokens;
    for (const StepRow& row : plan.rows) {
        tokens[row.kind] += row.q_len_max;
    }
    return tokens;
}

TEST(Fairness, DecodesRunInEveryStepBesideALongPrefill) {
    SchedulerConfig config = SchedulerRig::config();
    config.max_num_batched_tokens = 16;
    SchedulerRig rig(40, config);
    for (RequestId id : {1, 2, 3}) {
        rig.submit(request_of(id, prompt_of(4), 500));
    }
    rig.step();
    rig.submit(request_of(4, prompt_of(400), 10));
    for (int step = 0; step < 30; ++step) {
        const StepPlan plan = rig.plan();
        EXPECT_EQ(tokens_by_kind(plan)[RowKind::kDecode], 3);
        EXPECT_EQ(tokens_by_kind(plan)[RowKind::kPrefill], 13);
        EXPECT_EQ(plan.rows[0].kind, RowKind::kDecode);
        rig.commit(SchedulerRig::result_of(plan));
    }
}

TEST(Fairness, DecodesThatFillTheBudgetLeaveAPartToPrefill) {
    SchedulerConfig config = SchedulerRig::config();
    config.max_num_seqs = 20;
    config.max_num_batched_tokens = 16;
    SchedulerRig rig(60, config);
    for (RequestId id = 1; id <= 16; ++id) {
        rig.submit(request_of(id, prompt_of(1), 500));
    }
    rig.step();
    rig.submit(request_of(99, prompt_of(50), 10));
    for (int step = 0; step < 10; ++step) {
        const StepPlan plan = rig.plan();
        EXPECT_EQ(tokens_by_kind(plan)[RowKind::kDecode], 14);
        EXPECT_EQ(tokens_by_kind(plan)[RowKind::kPrefill], 2);
        rig.commit(SchedulerRig::result_of(plan));
    }
}

TEST(Fairness, DecodesTakeTurnsWhenTheBudgetIsTooSmallForAll) {
    SchedulerConfig config = SchedulerRig::config();
    config.max_num_batched_tokens = 3;
    SchedulerRig rig(40, config);
    for (RequestId id : {1, 2, 3, 4}) {
        rig.submit(request_of(id, prompt_of(3), 500));
    }
    while (rig.scheduler.stats().waiting > 0) {
        rig.step();
    }
    rig.step();
    rig.step();
    std::map<SlotId, int32_t> rows;
    for (int step = 0; step < 20; ++step) {
        const StepPlan plan = rig.plan();
        for (const StepRow& row : plan.rows) {
            ++rows[row.slot];
        }
        rig.commit(SchedulerRig::result_of(plan));
    }
    ASSERT_EQ(rows.size(), 4U);
    for (const auto& [slot, count] : rows) {
        EXPECT_EQ(count, 15) << slot;
    }
}

TEST(Fairness, ABudgetOfOneTokenAlternates) {
    SchedulerConfig config = SchedulerRig::config();
    config.max_num_batched_tokens = 1;
    SchedulerRig rig(40, config);
    rig.submit(request_of(1, prompt_of(1), 500));
    rig.step();
    rig.submit(request_of(2, prompt_of(30), 10));
    std::map<RowKind, int32_t> rows;
    for (int step = 0; step < 20; ++step) {
        const StepPlan plan = rig.plan();
        ++rows[plan.rows.at(0).kind];
        rig.commit(SchedulerRig::result_of(plan));
    }
    EXPECT_EQ(rows[RowKind::kDecode], 10);
    EXPECT_EQ(rows[RowKind::kPrefill], 10);
}

TEST(Fairness, AShortPromptPassesALongOneThatKeepsHalf) {
    SchedulerConfig config = SchedulerRig::config();
    config.max_num_batched_tokens = 200;
    SchedulerRig rig(40, config);
    rig.submit(request_of(1, prompt_of(900), 10));
    rig.step();
    rig.submit(request_of(2, prompt_of(30, 3000), 10));
    const StepPlan plan = rig.plan();
    ASSERT_EQ(plan.rows.size(), 2U);
    EXPECT_EQ(plan.rows[0].q_len_max, 170);  // its half, and what the short one left
    EXPECT_EQ(plan.rows[1].kind, RowKind::kPrefillLast);
    EXPECT_EQ(plan.token_count, 200);
}

TEST(Fairness, AdmissionIsByPriorityThenArrival) {
    SchedulerConfig config = SchedulerRig::config();
    config.max_num_seqs = 1;
    SchedulerRig rig(40, config);
    std::vector<RequestId> order;
    for (const auto& [id, priority] :
         std::vector<std::pair<RequestId, int32_t>>{{1, 0}, {2, 5}, {3, 0}, {4, -1}}) {
        Request request = request_of(id, prompt_of(5), 1);
        request.priority = priority;
        rig.submit(request);
    }
    for (const TokenEvent& event : rig.run()) {
        order.push_back(event.id);
    }
    EXPECT_EQ(order, (std::vector<RequestId>{4, 1, 3, 2}));
}

TEST(Fairness, AdmissionKeepsAPageFreeForEachRunningSequence) {
    SchedulerRig rig(4, SchedulerRig::config());
    rig.submit(request_of(1, prompt_of(60), 60));
    rig.submit(request_of(2, prompt_of(60, 500), 60));
    rig.submit(request_of(3, prompt_of(60, 900), 60));
    rig.step();
    rig.step();
    rig.step();
    EXPECT_EQ(rig.scheduler.stats().running, 2);
    EXPECT_EQ(rig.scheduler.stats().waiting, 1);
    rig.run();
    EXPECT_EQ(rig.scheduler.stats().preemptions, 0);
    EXPECT_EQ(rig.scheduler.stats().finished_length, 3);
}

// 1 ms a decode row, 0.1 ms a prefill token, 1 us a token of context.
double step_seconds(const StepShape& shape) {
    return 1e-3 * shape.decode_rows + 1e-4 * shape.prefill_tokens +
           1e-6 * static_cast<double>(shape.context_tokens);
}

TEST(StepBudget, CutsPrefillToTheTargetTimeBesideDecodes) {
    SchedulerConfig config = SchedulerRig::config();
    config.max_num_batched_tokens = 1000;
    config.step_time = step_seconds;
    config.target_tpot_s = 0.010;
    StepBudget budget(config);
    EXPECT_EQ(budget.prefill_limit(0), 1000);  // nobody decodes: nobody waits
    budget.take_decode(1, 100);
    EXPECT_EQ(budget.tokens_left(), 999);
    const int32_t limit = budget.prefill_limit(500);
    EXPECT_EQ(limit, 83);  // 1 ms + 0.1 ms + 0.5 ms, then 0.101 ms a token
    budget.take_prefill(limit, 500);
    EXPECT_EQ(budget.prefill_limit(0), 0);
    EXPECT_EQ(budget.tokens_left(), 916);
}

TEST(StepBudget, AChunkLateInALongPromptIsShorter) {
    SchedulerConfig config = SchedulerRig::config();
    config.max_num_batched_tokens = 1000;
    config.step_time = [](const StepShape& shape) { return 1e-7 * static_cast<double>(shape.attended); };
    config.target_tpot_s = 0.05;
    StepBudget budget(config);
    budget.take_decode(1, 1000);                  // attends 1,000 slots: 0.1 ms
    EXPECT_EQ(budget.prefill_limit(20'000), 24);  // 24 x 20,000 + 300 pairs = 48.03 ms; one more is over
    EXPECT_EQ(budget.prefill_limit(5'000), 98);
}

TEST(StepBudget, AlwaysAllowsAFirstChunk) {
    SchedulerConfig config = SchedulerRig::config();
    config.step_time = step_seconds;
    config.target_tpot_s = 0.0005;
    StepBudget budget(config);
    budget.take_decode(1, 100);
    EXPECT_EQ(budget.prefill_limit(0), kPrefillChunkMin);
    budget.take_prefill(kPrefillChunkMin, 0);
    EXPECT_EQ(budget.prefill_limit(0), 0);
}

}  // namespace
}  // namespace tessera

// When pages run out: who gives way, what is kept, and that all come to their end.
#include <gtest/gtest.h>

#include "sched/scheduler_testing.h"

namespace tessera {
namespace {

// Two sequences that together outgrow a pool of 5 pages; each may need 4.
class Preemption : public testing::Test {
  protected:
    Preemption() : rig(5, SchedulerRig::config()) {}

    void start(int32_t first_priority, int32_t second_priority) {
        for (RequestId id : {1, 2}) {
            Request request = request_of(id, prompt_of(30, static_cast<TokenId>(1000 * id)), 200);
            request.priority = id == 1 ? first_priority : second_priority;
            rig.submit(request);
        }
    }

    // Steps until somebody is preempted; the number of outputs each had by then.
    int32_t outputs_at_preemption() {
        int32_t outputs = 0;
        while (rig.scheduler.stats().preemptions == 0) {
            outputs += static_cast<int32_t>(rig.step().size());
        }
        return outputs;
    }

    SchedulerRig rig;
};

TEST_F(Preemption, TheLatestGivesWayAndContinuesWithItsOutputs) {
    start(0, 0);
    outputs_at_preemption();
    EXPECT_EQ(rig.scheduler.stats().running, 1);
    EXPECT_EQ(rig.scheduler.stats().waiting, 1);
    EXPECT_GT(rig.scheduler.stats().waiting_tokens, 30);
    const int64_t waiting_tokens = rig.scheduler.stats().waiting_tokens;
    int32_t outputs_of_second = 0;
    StepPlan readmission;
    while (readmission.inits.empty()) {
        readmission = rig.plan();
        for (const TokenEvent& event : rig.commit(SchedulerRig::result_of(readmission))) {
            outputs_of_second += event.id == 2;
        }
    }
    EXPECT_EQ(rig.scheduler.stats().finished_length, 1);
    const SlotInit& init = readmission.inits[0];
    EXPECT_EQ(init.prompt, prompt_of(30, 2000));
    EXPECT_EQ(init.output, std::vector<TokenId>(static_cast<size_t>(waiting_tokens - 30), 7));
    const auto events = rig.run();
    outputs_of_second += static_cast<int32_t>(events.size());
    EXPECT_EQ(static_cast<int64_t>(init.output.size()) + outputs_of_second, 200);
    EXPECT_EQ(rig.scheduler.stats().generated_tokens, 400);
    EXPECT_EQ(rig.scheduler.stats().prompt_tokens, 60);
}

TEST_F(Preemption, PriorityCountsBeforeArrival) {
    start(1, 0);
    outputs_at_preemption();
    const auto events = rig.step();
    ASSERT_FALSE(events.empty());
    EXPECT_EQ(events[0].id, 2U);
}

TEST_F(Preemption, AVictimWithRowsInFlightKeepsTheirTokens) {
    start(0, 0);
    int32_t tokens_of_second = 0;
    std::vector<StepPlan> plans;
    while (rig.scheduler.stats().preemptions == 0) {
        if (plans.size() < 2) {
            if (auto plan = rig.scheduler.next(rig.now)) {
                plans.push_back(std::move(*plan));
                continue;
            }
        }
        ASSERT_FALSE(plans.empty());
        for (const TokenEvent& event : rig.commit(SchedulerRig::result_of(plans.front()))) {
            tokens_of_second += event.id == 2;
        }
        plans.erase(plans.begin());
    }
    EXPECT_EQ(rig.scheduler.stats().waiting_tokens, 30 + tokens_of_second);
}

TEST_F(Preemption, APreemptedRequestCanBeCancelledOrFinished) {
    start(0, 0);
    outputs_at_preemption();
    rig.scheduler.finish(2, 40, rig.now);
    const auto events = rig.scheduler.take_events();
    ASSERT_EQ(events.size(), 1U);
    EXPECT_EQ(events[0].finish, FinishReason::kStop);
    EXPECT_EQ(rig.scheduler.stats().waiting_tokens, 0);
    rig.run();
    EXPECT_EQ(rig.scheduler.stats().generated_tokens, 240);
    EXPECT_TRUE(rig.scheduler.idle());
}

TEST_F(Preemption, ItsPagesStayCachedForItsReturn) {
    start(0, 0);
    outputs_at_preemption();
    rig.scheduler.cancel(1, FinishReason::kAbort, rig.now);
    const StepPlan plan = rig.plan();
    ASSERT_EQ(plan.inits.size(), 1U);
    EXPECT_GE(plan.rows[0].position_lower, 64);
    rig.commit(SchedulerRig::result_of(plan));
    EXPECT_EQ(rig.scheduler.stats().cached_tokens, 0);  // counted at the first admission alone
}

TEST(PreemptionOfMany, AllComeToTheirEndInAPoolForOne) {
    SchedulerConfig config = SchedulerRig::config();
    config.max_num_batched_tokens = 5;
    SchedulerRig rig(4, config);
    for (RequestId id = 1; id <= 12; ++id) {
        rig.submit(request_of(id, prompt_of(5, static_cast<TokenId>(1000 * id)), 250));
    }
    const auto events = rig.run();
    EXPECT_EQ(events.size(), 12U * 250U);
    EXPECT_EQ(rig.scheduler.stats().finished_length, 12);
    EXPECT_GT(rig.scheduler.stats().preemptions, 0);
    EXPECT_EQ(rig.cache.available(), 4);
}

}  // namespace
}  // namespace tessera

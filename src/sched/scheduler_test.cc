// One request's way through the scheduler: admission, chunks, bounds, ends. Several at once: fairness_test.cc
// and preemption_test.cc.
#include "sched/scheduler.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "sched/scheduler_testing.h"

namespace tessera {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;

TEST(Scheduler, PrefillsInChunksThenDecodesWhileAStepIsInFlight) {
    SchedulerRig rig(8, SchedulerRig::config());
    rig.submit(request_of(1, prompt_of(100), 3));
    const StepPlan first = rig.plan();
    ASSERT_EQ(first.inits.size(), 1U);
    EXPECT_EQ(first.inits[0].prompt, prompt_of(100));
    EXPECT_THAT(first.inits[0].stop_ids, ElementsAre(kTestEos));
    ASSERT_EQ(first.rows.size(), 1U);
    EXPECT_EQ(first.rows[0].kind, RowKind::kPrefill);
    EXPECT_EQ(first.rows[0].tokens, prompt_of(64));
    EXPECT_EQ(first.rows[0].new_pages.size(), 2U);

    const StepPlan second = rig.plan();  // the first is not committed
    EXPECT_EQ(second.rows[0].kind, RowKind::kPrefillLast);
    EXPECT_EQ(second.rows[0].position_lower, 64);
    EXPECT_EQ(second.rows[0].tokens, prompt_of(36, 164));
    EXPECT_EQ(second.rows[0].page_table_length, 2);
    EXPECT_TRUE(rig.commit(SchedulerRig::result_of(first)).empty());

    const StepPlan third = rig.plan();  // its input token is made by the second, which is in flight
    EXPECT_EQ(third.rows[0].kind, RowKind::kDecode);
    EXPECT_EQ(third.rows[0].position_lower, 100);
    EXPECT_EQ(third.rows[0].position_upper, 100);
    const auto events = rig.commit(SchedulerRig::result_of(second));
    ASSERT_EQ(events.size(), 1U);
    EXPECT_EQ(events[0].tokens[0].token, 7);
    EXPECT_EQ(events[0].tokens[0].logprob, -0.5F);
    EXPECT_EQ(events[0].prompt_tokens, 100);
    EXPECT_EQ(events[0].finish, FinishReason::kNone);
}

TEST(Scheduler, PlansNoRowPastTheLastToken) {
    SchedulerRig rig(8, SchedulerRig::config());
    rig.submit(request_of(1, prompt_of(10), 2));
    const StepPlan first = rig.plan();
    const StepPlan second = rig.plan();
    rig.commit(SchedulerRig::result_of(first));
    EXPECT_FALSE(rig.scheduler.next(rig.now));  // the second makes the last token
    const auto events = rig.commit(SchedulerRig::result_of(second));
    ASSERT_EQ(events.size(), 1U);
    EXPECT_EQ(events[0].finish, FinishReason::kLength);
    EXPECT_TRUE(rig.scheduler.idle());
    EXPECT_EQ(rig.scheduler.stats().generated_tokens, 2);
    EXPECT_EQ(rig.scheduler.stats().finished_length, 1);
    EXPECT_EQ(rig.cache.stats().pages_referenced, 0);
}

TEST(Scheduler, TheContextEndsARequestToo) {
    SchedulerConfig config = SchedulerRig::config();
    config.max_model_len = 20;
    SchedulerRig rig(8, config);
    rig.submit(request_of(1, prompt_of(16), 100));
    const auto events = rig.run();
    EXPECT_EQ(events.size(), 4U);
    EXPECT_EQ(events.back().finish, FinishReason::kLength);
}

TEST(Scheduler, AStopIdEndsTheRequestAndTheRowInFlightIsIgnored) {
    SchedulerRig rig(8, SchedulerRig::config());
    rig.submit(request_of(1, prompt_of(10), 50));
    rig.step();
    const StepPlan stops = rig.plan();
    const StepPlan wasted = rig.plan();
    const auto events = rig.commit(SchedulerRig::result_of(stops, {kTestEos}));
    ASSERT_EQ(events.size(), 1U);
    EXPECT_EQ(events[0].finish, FinishReason::kStop);
    EXPECT_EQ(events[0].stop_token, kTestEos);
    EXPECT_EQ(events[0].tokens[0].token, kTestEos);
    EXPECT_FALSE(rig.scheduler.has_work());
    EXPECT_FALSE(rig.scheduler.idle());
    EXPECT_EQ(rig.scheduler.stats().slots_free, 3);
    EXPECT_EQ(rig.cache.stats().pages_referenced, 1);
    EXPECT_TRUE(rig.commit(SchedulerRig::result_of(wasted)).empty());
    EXPECT_TRUE(rig.scheduler.idle());
    EXPECT_EQ(rig.scheduler.stats().generated_tokens, 2);

    rig.submit(request_of(2, prompt_of(10), 50));
    EXPECT_THAT(rig.plan().retired, ElementsAre(0));
}

TEST(Scheduler, AnOnlySlotIsRetiredAndGivenAgainInOnePlanWithANewGeneration) {
    SchedulerConfig config = SchedulerRig::config();
    config.max_num_seqs = 1;
    SchedulerRig rig(8, config);
    rig.submit(request_of(1, prompt_of(10), 1));
    const StepPlan first = rig.plan();
    rig.commit(SchedulerRig::result_of(first));
    rig.submit(request_of(2, prompt_of(10), 1));
    const StepPlan second = rig.plan();
    EXPECT_THAT(second.retired, ElementsAre(0));
    ASSERT_EQ(second.inits.size(), 1U);
    EXPECT_EQ(second.inits[0].slot, 0);
    EXPECT_GT(second.inits[0].generation, first.inits[0].generation);
}

TEST(Scheduler, MinTokensAndIgnoreEos) {
    SchedulerRig rig(8, SchedulerRig::config());
    Request patient = request_of(1, prompt_of(10), 50);
    patient.sampling.min_tokens = 3;
    rig.submit(patient);
    EXPECT_EQ(rig.run({kTestEos}).size(), 4U);

    Request deaf = request_of(2, prompt_of(10), 5);
    deaf.sampling.ignore_eos = true;
    deaf.sampling.stop_ids = {9};
    rig.submit(deaf);
    const StepPlan first = rig.plan();
    EXPECT_THAT(first.inits[0].stop_ids, ElementsAre(9));
    EXPECT_EQ(rig.commit(SchedulerRig::result_of(first, {kTestEos}))[0].finish, FinishReason::kNone);
    EXPECT_EQ(rig.run({9}).back().stop_token, 9);
}

TEST(Scheduler, DraftsWidenTheBoundsAndTokensPastAStopAreDropped) {
    SchedulerConfig config = SchedulerRig::config();
    config.draft_tokens_max = 3;
    SchedulerRig rig(8, config);
    rig.submit(request_of(1, prompt_of(10), 50));
    rig.step();
    const StepPlan first = rig.plan();
    EXPECT_EQ(first.rows[0].q_len_max, 4);
    EXPECT_EQ(first.token_count, 4);
    const StepPlan second = rig.plan();
    EXPECT_EQ(second.rows[0].position_lower, 11);
    EXPECT_EQ(second.rows[0].position_upper, 14);
    EXPECT_EQ(rig.commit(SchedulerRig::result_of(first, {5, 6})).at(0).tokens.size(), 2U);
    const auto events = rig.commit(SchedulerRig::result_of(second, {8, kTestEos, 9, 9}));
    ASSERT_EQ(events.at(0).tokens.size(), 2U);
    EXPECT_EQ(events[0].finish, FinishReason::kStop);
    EXPECT_EQ(rig.scheduler.stats().generated_tokens, 5);
}

TEST(Scheduler, DraftsNeverPassTheLastToken) {
    SchedulerConfig config = SchedulerRig::config();
    config.draft_tokens_max = 3;
    SchedulerRig rig(8, config);
    rig.submit(request_of(1, prompt_of(10), 6));
    rig.step();
    EXPECT_EQ(rig.plan().rows[0].draft_count, 3);
    EXPECT_EQ(rig.plan().rows[0].draft_count, 0);  // one token may be left, whatever the drafts bring
}

TEST(Scheduler, ReportsCachedTokensAndComputesOneAtLeast) {
    SchedulerRig rig(12, SchedulerRig::config());
    const auto prompt = prompt_of(256);
    rig.submit(request_of(1, prompt, 1));
    EXPECT_EQ(rig.run().back().cached_tokens, 0);
    rig.submit(request_of(2, prompt, 1));
    const StepPlan plan = rig.plan();
    EXPECT_EQ(plan.rows[0].position_lower, 192);
    EXPECT_EQ(plan.rows[0].new_pages.size(), 4U);
    EXPECT_EQ(rig.commit(SchedulerRig::result_of(plan)).at(0).cached_tokens, 192);
    Request salted = request_of(3, prompt, 1);
    salted.cache_salt = "another tenant";
    rig.submit(salted);
    EXPECT_EQ(rig.run().back().cached_tokens, 0);
    EXPECT_EQ(rig.cache.stats().queried_tokens, 768);
    EXPECT_EQ(rig.cache.stats().hit_tokens, 192);
    EXPECT_EQ(rig.scheduler.stats().cached_tokens, 192);
    EXPECT_EQ(rig.scheduler.stats().prompt_tokens, 768);
}

TEST(Scheduler, TheNextTurnFindsTheAnswersPages) {
    SchedulerRig rig(12, SchedulerRig::config());
    rig.submit(request_of(1, prompt_of(60), 80));
    rig.run();
    auto turn = prompt_of(60);
    turn.insert(turn.end(), 90, 7);
    rig.submit(request_of(2, turn, 1));
    EXPECT_EQ(rig.run().back().cached_tokens, 128);
}

TEST(Scheduler, FinishDiscardsTokensAndTheirPages) {
    SchedulerRig rig(12, SchedulerRig::config());
    rig.submit(request_of(1, prompt_of(60), 200));
    for (int i = 0; i < 130; ++i) {
        rig.step();
    }
    const StepPlan in_flight = rig.plan();
    rig.scheduler.finish(1, 50, rig.now);
    rig.scheduler.finish(1, 40, rig.now);  // it has ended: ignored
    const auto events = rig.scheduler.take_events();
    ASSERT_EQ(events.size(), 1U);
    EXPECT_EQ(events[0].finish, FinishReason::kStop);
    EXPECT_EQ(events[0].stop_token, -1);
    EXPECT_TRUE(rig.commit(SchedulerRig::result_of(in_flight)).empty());
    EXPECT_EQ(rig.scheduler.stats().generated_tokens, 50);
    EXPECT_EQ(rig.scheduler.stats().finished_stop, 1);
    EXPECT_EQ(rig.cache.stats().pages_cached, 1);  // 110 tokens are the answer: one complete page
}

TEST(Scheduler, CancelAtEveryStage) {
    SchedulerRig rig(12, SchedulerRig::config());
    rig.submit(request_of(1, prompt_of(10), 50));  // will decode
    rig.step();
    rig.submit(request_of(2, prompt_of(200), 50));  // will be inside its prefill
    rig.step();
    const StepPlan in_flight = rig.plan();
    rig.submit(request_of(3, prompt_of(10), 50));  // waits
    for (RequestId id : {1, 2, 3, 3, 77}) {
        rig.scheduler.cancel(id, FinishReason::kAbort, rig.now);
    }
    const auto events = rig.scheduler.take_events();
    ASSERT_EQ(events.size(), 3U);
    for (const TokenEvent& event : events) {
        EXPECT_EQ(event.finish, FinishReason::kAbort);
    }
    EXPECT_FALSE(rig.scheduler.next(rig.now));
    EXPECT_TRUE(rig.commit(SchedulerRig::result_of(in_flight)).empty());
    EXPECT_TRUE(rig.scheduler.idle());
    EXPECT_EQ(rig.scheduler.stats().finished_abort, 3);
    EXPECT_EQ(rig.scheduler.stats().waiting_tokens, 0);
    EXPECT_EQ(rig.cache.stats().pages_referenced, 0);
}

TEST(Scheduler, DeadlinesEndWaitingAndRunningRequests) {
    SchedulerConfig config = SchedulerRig::config();
    config.max_num_seqs = 1;
    SchedulerRig rig(12, config);
    for (RequestId id : {1, 2}) {
        Request request = request_of(id, prompt_of(10), 50);
        request.deadline = 100;
        rig.submit(request);
    }
    rig.step();
    rig.now = 99;
    rig.step();
    rig.now = 100;
    EXPECT_FALSE(rig.scheduler.next(rig.now));
    EXPECT_EQ(rig.scheduler.take_events().size(), 2U);
    EXPECT_EQ(rig.scheduler.stats().finished_deadline, 2);
    EXPECT_TRUE(rig.scheduler.idle());
}

TEST(Scheduler, AFailedRowEndsItsRequestAloneAndItsPagesAreNotReused) {
    SchedulerRig rig(12, SchedulerRig::config());
    rig.submit(request_of(1, prompt_of(64), 50));
    rig.step();
    rig.submit(request_of(2, prompt_of(20, 500), 50));
    rig.step();
    const StepPlan plan = rig.plan();
    StepResult result = SchedulerRig::result_of(plan);
    result.rows[0].error = "NaN in the logits";
    result.rows[0].tokens.clear();
    const auto events = rig.commit(result);
    ASSERT_EQ(events.size(), 2U);
    EXPECT_EQ(events[0].finish, FinishReason::kError);
    EXPECT_EQ(events[0].error, "NaN in the logits");
    EXPECT_EQ(events[1].finish, FinishReason::kNone);
    EXPECT_EQ(rig.cache.stats().pages_cached, 0);
    EXPECT_EQ(rig.scheduler.stats().finished_error, 1);
}

TEST(Scheduler, RefusesWhatCanNeverFitAndNamesBothNumbers) {
    SchedulerConfig config = SchedulerRig::config();
    config.max_model_len = 500;
    const SchedulerRig rig(4, config);
    const auto refused = [&](int32_t prompt, int32_t max_tokens) {
        const Status status = rig.scheduler.fits(request_of(1, prompt_of(prompt), max_tokens));
        EXPECT_EQ(status.code(), StatusCode::kInvalidArgument);
        return status.message();
    };
    EXPECT_THAT(refused(500, 1), testing::AllOf(HasSubstr("500 tokens"), HasSubstr("context of 500")));
    EXPECT_THAT(refused(200, 57), testing::AllOf(HasSubstr("need 5 KV pages"), HasSubstr("pool has 4")));
    EXPECT_THAT(refused(0, 1), HasSubstr("0 tokens"));
    EXPECT_THAT(refused(1, 0), HasSubstr("max_tokens is 0"));
    EXPECT_TRUE(rig.scheduler.fits(request_of(1, prompt_of(200), 56)).ok());
    SchedulerConfig small = SchedulerRig::config();
    small.max_model_len = 256;
    EXPECT_TRUE(SchedulerRig(4, small).scheduler.fits(request_of(1, prompt_of(200), 1'000'000)).ok());
}

TEST(SchedulerDeathTest, RefusesResultsOutOfOrderAndTooManyPlans) {
    SchedulerRig rig(8, SchedulerRig::config());
    rig.submit(request_of(1, prompt_of(10), 50));
    const StepPlan first = rig.plan();
    const StepPlan second = rig.plan();
    EXPECT_DEATH(rig.scheduler.next(rig.now), "too many plans");
    EXPECT_DEATH(rig.commit(SchedulerRig::result_of(second)), "out of order");
    EXPECT_DEATH(rig.commit(SchedulerRig::result_of(first, {})), "too many tokens");
}

}  // namespace
}  // namespace tessera

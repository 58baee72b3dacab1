#include "engine/engine.h"

#include <chrono>
#include <condition_variable>
#include <deque>
#include <gtest/gtest.h>
#include <mutex>
#include <thread>

namespace tessera {
namespace {

// Answers each plan with tokens that depend on slot-independent state only: 100, 101, ... per request.
class ScriptedRunner final : public Runner {
  public:
    explicit ScriptedRunner(std::chrono::microseconds step_time = {}) : step_time_(step_time) {}

    void launch(StepPlan plan) override {
        for (const SlotInit& init : plan.inits) {
            next_[init.slot] = 100 + static_cast<TokenId>(init.output.size());
        }
        plans_.push_back(std::move(plan));
        EXPECT_LE(plans_.size(), 2u);
    }

    StepResult collect() override {
        std::this_thread::sleep_for(step_time_);
        const StepPlan plan = std::move(plans_.front());
        plans_.pop_front();
        StepResult result;
        result.step = plan.step;
        result.started = now_ns();
        result.finished = now_ns();
        for (const StepRow& row : plan.rows) {
            RowResult one{.slot = row.slot, .generation = row.generation};
            if (row.kind != RowKind::kPrefill) {
                GeneratedToken token;
                token.token = next_[row.slot]++;
                one.tokens.push_back(std::move(token));
            }
            result.rows.push_back(std::move(one));
        }
        return result;
    }

    int max_in_flight() const override { return 2; }

  private:
    const std::chrono::microseconds step_time_;
    std::deque<StepPlan> plans_;
    std::unordered_map<SlotId, TokenId> next_;
};

// What a sink has seen, and a way to wait for its end.
class Collector {
  public:
    EventSink sink() {
        return [this](TokenEvent&& event) {
            std::lock_guard lock(mutex_);
            EXPECT_EQ(finish_, FinishReason::kNone) << "an event after the last one";
            for (const GeneratedToken& token : event.tokens) {
                tokens_.push_back(token.token);
            }
            if (event.finish != FinishReason::kNone) {
                finish_ = event.finish;
                done_.notify_all();
            }
        };
    }

    FinishReason wait() {
        std::unique_lock lock(mutex_);
        EXPECT_TRUE(
            done_.wait_for(lock, std::chrono::seconds(60), [&] { return finish_ != FinishReason::kNone; }));
        return finish_;
    }

    std::vector<TokenId> tokens() {
        std::lock_guard lock(mutex_);
        return tokens_;
    }

  private:
    std::mutex mutex_;
    std::condition_variable done_;
    std::vector<TokenId> tokens_;
    FinishReason finish_ = FinishReason::kNone;
};

EngineConfig small_config() {
    EngineConfig config;
    config.num_pages = 64;
    config.scheduler.max_num_seqs = 4;
    config.scheduler.max_num_batched_tokens = 128;
    config.scheduler.max_model_len = 1024;
    config.scheduler.eos_ids = {7};
    return config;
}

Request request_of(Engine& engine, int32_t prompt_tokens, int32_t max_tokens) {
    Request request;
    request.id = engine.new_request_id();
    request.prompt.assign(static_cast<size_t>(prompt_tokens), 5);
    request.sampling.max_tokens = max_tokens;
    return request;
}

TEST(Engine, RunsManyRequestsToTheirLength) {
    constexpr int kRequests = 40;
    std::vector<Collector> collectors(kRequests);
    Engine engine(small_config(), std::make_unique<ScriptedRunner>());
    for (int i = 0; i < kRequests; ++i) {
        ASSERT_TRUE(engine.submit(request_of(engine, 1 + i * 7, 3 + i), collectors[i].sink()).ok());
    }
    for (int i = 0; i < kRequests; ++i) {
        EXPECT_EQ(collectors[i].wait(), FinishReason::kLength);
        std::vector<TokenId> expected;
        for (int t = 0; t < 3 + i; ++t) {
            expected.push_back(100 + t);
        }
        EXPECT_EQ(collectors[i].tokens(), expected) << i;
    }
    while (!engine.idle()) {
        std::this_thread::yield();
    }
    EXPECT_EQ(engine.stalled_s(), 0.0);
}

TEST(Engine, StopIdEndsARequest) {
    Collector collector;
    Engine engine(small_config(), std::make_unique<ScriptedRunner>());
    Request request = request_of(engine, 10, 50);
    request.sampling.stop_ids = {104};
    ASSERT_TRUE(engine.submit(std::move(request), collector.sink()).ok());
    EXPECT_EQ(collector.wait(), FinishReason::kStop);
    EXPECT_EQ(collector.tokens(), (std::vector<TokenId>{100, 101, 102, 103, 104}));
}

TEST(Engine, CancelReachesEveryRequest) {
    std::vector<Collector> collectors(20);
    Engine engine(small_config(), std::make_unique<ScriptedRunner>(std::chrono::microseconds(200)));
    std::vector<RequestId> ids;
    for (Collector& collector : collectors) {
        Request request = request_of(engine, 100, 900);
        ids.push_back(request.id);
        ASSERT_TRUE(engine.submit(std::move(request), collector.sink()).ok());
    }
    for (const RequestId id : ids) {
        engine.cancel(id);
    }
    for (Collector& collector : collectors) {
        EXPECT_EQ(collector.wait(), FinishReason::kAbort);
    }
    while (engine.stats().cache.pages_referenced != 0) {
        std::this_thread::sleep_for(std::chrono::milliseconds(1));
    }
    EXPECT_EQ(engine.stats().scheduler.running, 0);
}

TEST(Engine, RefusesWhatCannotFitAndWhatIsTooMuch) {
    EngineConfig config = small_config();
    config.max_queued_requests = 2;
    Collector never;
    std::vector<Collector> collectors(12);  // before the engine: its destructor still delivers
    Engine engine(config, std::make_unique<ScriptedRunner>(std::chrono::milliseconds(5)));
    const Status too_long = engine.submit(request_of(engine, 1024, 1), never.sink());
    EXPECT_EQ(too_long.code(), StatusCode::kInvalidArgument);
    int refused = 0;
    for (Collector& collector : collectors) {
        const Status status = engine.submit(request_of(engine, 64, 500), collector.sink());
        refused += status.code() == StatusCode::kResourceExhausted;
    }
    EXPECT_GE(refused, 1);
    engine.stop_admission();
    EXPECT_EQ(engine.submit(request_of(engine, 4, 4), never.sink()).code(), StatusCode::kUnavailable);
}

TEST(Engine, DestructorEndsEveryStream) {
    std::vector<Collector> collectors(10);
    {
        Engine engine(small_config(), std::make_unique<ScriptedRunner>(std::chrono::microseconds(500)));
        for (Collector& collector : collectors) {
            ASSERT_TRUE(engine.submit(request_of(engine, 70, 900), collector.sink()).ok());
        }
    }
    for (Collector& collector : collectors) {
        EXPECT_EQ(collector.wait(), FinishReason::kAbort);
    }
}

}  // namespace
}  // namespace tessera

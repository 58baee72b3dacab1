#include "idle_host.h"

#include <algorithm>
#include <condition_variable>
#include <deque>
#include <mutex>
#include <vector>

#include "engine/engine.h"
#include "ops/op_case.h"

namespace tessera {
namespace {

constexpr size_t kWarmUpSteps = 16;

// Passes everything on and keeps the timings of the steps in which all requests decode. Loop thread alone;
// read when the engine is gone.
class WatchedRunner final : public Runner {
  public:
    WatchedRunner(CudaRunner& runner, int32_t batch, std::vector<StepTiming>& timings)
        : runner_(runner), batch_(static_cast<size_t>(batch)), timings_(timings) {}

    void launch(StepPlan plan) override {
        const bool decode =
            std::ranges::all_of(plan.rows, [](const StepRow& row) { return row.kind == RowKind::kDecode; });
        full_.push_back(decode && plan.rows.size() == batch_);
        runner_.launch(std::move(plan));
    }
    StepResult collect() override {
        StepResult result = runner_.collect();
        if (full_.front()) {
            timings_.push_back(runner_.last_timing());
        }
        full_.pop_front();
        return result;
    }
    int max_in_flight() const override { return runner_.max_in_flight(); }

  private:
    CudaRunner& runner_;
    const size_t batch_;
    std::vector<StepTiming>& timings_;
    std::deque<bool> full_;  // of the plans in flight
};

EngineConfig engine_config(CudaRunner& runner, const ModelConfig& config, int32_t batch, int32_t tokens) {
    EngineConfig out;
    out.prefix_caching = false;
    out.num_pages = runner.num_pages();
    out.scheduler.max_num_seqs = batch;
    out.scheduler.max_num_batched_tokens = batch * kIdlePromptTokens;
    out.scheduler.max_model_len = kIdlePromptTokens + tokens + 1;
    out.scheduler.eos_ids = config.eos_token_ids;
    return out;
}

Request random_request(OpRandom& random, const ModelConfig& config, int32_t tokens) {
    Request request;
    for (int32_t i = 0; i < kIdlePromptTokens; ++i) {
        request.prompt.push_back(static_cast<TokenId>(random.below(config.vocab_size)));
    }
    request.sampling.temperature = 0;
    request.sampling.ignore_eos = true;
    request.sampling.max_tokens = tokens;
    return request;
}

// Submits the requests and waits for the last one's end, also when one is refused: the sinks of those before
// it point to what is on this stack.
Status run_requests(Engine& engine, const ModelConfig& config, int32_t batch, int32_t tokens) {
    std::mutex mutex;
    std::condition_variable ended;
    int32_t running = 0;
    std::string error;
    Status refused;
    OpRandom random(7);
    for (int32_t i = 0; i < batch && refused.ok(); ++i) {
        Request request = random_request(random, config, tokens);
        request.id = engine.new_request_id();
        {
            const std::lock_guard lock(mutex);
            ++running;
        }
        refused = engine.submit(std::move(request), [&](TokenEvent&& event) {
            if (event.finish == FinishReason::kNone) {
                return;
            }
            const std::lock_guard lock(mutex);
            error = event.error.empty() ? error : event.error;
            --running;
            ended.notify_one();
        });
    }
    std::unique_lock lock(mutex);
    running -= refused.ok() ? 0 : 1;
    ended.wait(lock, [&] { return running == 0; });
    return error.empty() ? refused : unavailable("bench engine: " + error);
}

}  // namespace

Result<IdleHost> measure_idle_host(CudaRunner& runner, const ModelConfig& config, int32_t batch,
                                   int32_t tokens) {
    std::vector<StepTiming> timings;
    {
        Engine engine(engine_config(runner, config, batch, tokens),
                      std::make_unique<WatchedRunner>(runner, batch, timings));
        if (Status status = run_requests(engine, config, batch, tokens); !status.ok()) {
            return status;
        }
    }
    if (timings.size() <= kWarmUpSteps) {
        return unavailable("bench engine: too few decode steps with all requests running");
    }
    IdleHost out{.batch = batch, .steps = static_cast<int32_t>(timings.size() - kWarmUpSteps)};
    for (size_t i = kWarmUpSteps; i < timings.size(); ++i) {
        out.step_us += timings[i].busy_us / out.steps;
        out.period_us += (timings[i].busy_us + timings[i].gap_us) / out.steps;
        out.longest_gap_us = std::max(out.longest_gap_us, timings[i].gap_us);
    }
    Result<StepProbe> probe = runner.probe(25);
    if (!probe.ok()) {
        return probe.status();
    }
    out.alone_us = probe->step_us;
    return out;
}

}  // namespace tessera

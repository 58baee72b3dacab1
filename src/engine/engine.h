// Engine: the asynchronous step loop. Owns the scheduler, the cache and the runner; everything it promises is
// in docs/contracts/engine.md.
#pragma once

#include <atomic>
#include <functional>
#include <iterator>
#include <memory>
#include <string>

#include "base/status.h"
#include "cache/kv_cache.h"
#include "runner/runner.h"
#include "sched/scheduler.h"
#include "types/request.h"
#include "types/token_event.h"

namespace tessera {

// Called on the engine's delivery thread, in order for one request; must not block and must not call back
// into the engine other than by cancel() and finish().
using EventSink = std::function<void(TokenEvent&&)>;

struct EngineConfig {
    SchedulerConfig scheduler;
    int32_t num_pages = 0;
    bool prefix_caching = true;
    // Admission: requests waiting (not yet given a slot), and their prompt tokens. Over either, submit()
    // answers resource_exhausted. 0 tokens = no limit.
    int32_t max_queued_requests = 4096;
    int64_t max_queued_tokens = 0;
};

// A histogram of a stage's times, buckets by powers of two from 1 us.
struct StageHistogram {
    static constexpr int kBuckets = 32;
    uint64_t count = 0;
    double sum_s = 0;
    uint64_t bucket[kBuckets] = {};  // bucket[i]: time in [2^i, 2^(i+1)) us; the first also what is below
};

// A histogram of the tokens that a step computes.
struct TokenHistogram {
    static constexpr int64_t kBounds[] = {1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384};
    static constexpr size_t kBuckets = std::size(kBounds) + 1;
    uint64_t count = 0;
    int64_t sum = 0;
    uint64_t bucket[kBuckets] = {};  // bucket[i]: at most kBounds[i] tokens; the last: more than any bound
};

struct EngineStats {
    SchedulerStats scheduler;
    CacheStats cache;
    uint64_t steps = 0;
    TokenHistogram step_tokens;  // of the steps launched
    // The loop's stages: plan (scheduler.next), launch, collect (waiting for the runner), commit, deliver;
    // step = the runner's own time.
    StageHistogram plan, launch, collect, commit, deliver, step;
};

class Engine {
  public:
    Engine(EngineConfig config, std::unique_ptr<Runner> runner);
    ~Engine();  // abort_all() and join

    // Thread-safe and immediate: invalid_argument when it can never fit, resource_exhausted over the queue
    // limits, unavailable while draining. On success the sink will get exactly one event with a finish
    // reason.
    Status submit(Request request, EventSink sink);
    RequestId new_request_id();
    void cancel(RequestId id, FinishReason reason = FinishReason::kAbort);  // thread-safe
    void finish(RequestId id, int32_t n_tokens);                            // thread-safe
    EngineStats stats() const;                                              // thread-safe

    // No new requests from now on (submit returns unavailable).
    void stop_admission();
    bool draining() const;
    bool idle() const;
    void abort_all();
    // Seconds since the loop last made progress while work was waiting; 0 when idle.
    double stalled_s() const;

  private:
    struct Impl;
    std::unique_ptr<Impl> impl_;
};

}  // namespace tessera

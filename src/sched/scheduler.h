// Scheduler: pure policy. (requests, pages, time) -> StepPlan; StepResult -> TokenEvents. No threads, no
// clock of its own, no device. Single-threaded (the engine's loop). The rules are in
// docs/contracts/engine.md, section sched.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <vector>

#include "base/status.h"
#include "cache/kv_cache.h"
#include "types/request.h"
#include "types/step_plan.h"
#include "types/token_event.h"

namespace tessera {

// What the time of a step depends on.
struct StepShape {
    int32_t decode_rows = 0;
    int32_t prefill_tokens = 0;
    int64_t context_tokens = 0;  // sum over rows of the KV length read
    int64_t attended = 0;  // query-slot pairs of one head: sum over tokens of the slots that each attends
};

struct SchedulerConfig {
    int32_t max_num_seqs = 64;             // slots
    int32_t max_num_batched_tokens = 512;  // per step
    int32_t max_model_len = 0;             // prompt + output, at most
    std::vector<TokenId> eos_ids;
    int32_t steps_in_flight = 2;   // plans launched and not yet committed, at most
    int32_t draft_tokens_max = 0;  // speculation (a later issue); a result row may carry 1 + this many tokens
    // Seconds a step of this shape takes; empty = unbounded. With target_tpot_s > 0 a prefill chunk beside
    // decode rows is cut so that step_time stays under it.
    std::function<double(const StepShape&)> step_time;
    double target_tpot_s = 0;
    CacheIdentity identity;
};

struct SchedulerStats {
    int32_t running = 0, waiting = 0, slots_free = 0;
    int64_t waiting_tokens = 0;
    int64_t preemptions = 0, prompt_tokens = 0, cached_tokens = 0, generated_tokens = 0;
    int64_t finished_stop = 0, finished_length = 0, finished_abort = 0, finished_deadline = 0,
            finished_error = 0;
};

class Scheduler {
  public:
    Scheduler(SchedulerConfig config, KvCache& cache);
    ~Scheduler();

    // invalid_argument, naming both numbers, when the request can never fit the pool or the context.
    // Thread-safe: reads only the configuration.
    Status fits(const Request& request) const;
    // REQUIRES: fits(request).ok() and a fresh id. Exactly one event with a finish reason will follow, sooner
    // or later. The waiting queue is bounded by the engine's admission, not here.
    void submit(Request request, TimeNs now);
    // The request ends with `reason`; unknown or ended ids are ignored. Its event is available at once, its
    // slot and pages are retired when the last step that could touch them has been committed.
    void cancel(RequestId id, FinishReason reason, TimeNs now);
    // The first n_tokens output tokens are the answer (a stop string was found): the request ends with kStop,
    // tokens past them are discarded, not counted, and their pages not published.
    void finish(RequestId id, int32_t n_tokens, TimeNs now);
    // The next plan, or nothing when no row can run now. REQUIRES: fewer than steps_in_flight plans are
    // uncommitted.
    std::optional<StepPlan> next(TimeNs now);
    // Results must be committed in the order of their plans.
    void commit(const StepResult& result, TimeNs now);
    std::vector<TokenEvent> take_events();

    bool idle() const;      // nothing waits, runs or is in flight
    bool has_work() const;  // something waits or runs
    SchedulerStats stats() const;
    void check_integrity() const;

  private:
    struct Impl;
    std::unique_ptr<Impl> impl_;
};

}  // namespace tessera

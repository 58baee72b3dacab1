// Scheduler::Impl: the scheduler's state and its moves, one file for each group of them: lifecycle.cc,
// planning.cc, admission.cc, commit.cc.
#pragma once

#include <deque>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "sched/internal/sequence.h"
#include "sched/internal/slots.h"
#include "sched/internal/step_budget.h"
#include "sched/internal/waiting_queue.h"
#include "sched/scheduler.h"

namespace tessera {

// A row in flight. The sequence outlives it: none is dropped or evicted before its rows are committed.
struct RowInFlight {
    Sequence* sequence = nullptr;
    RowKind kind = RowKind::kDecode;
    int32_t tokens = 0;  // q_len_max
    int32_t drafts = 0;
};

struct PlanInFlight {
    uint64_t step = 0;
    std::vector<RowInFlight> rows;
};

// A prefill chunk of the plan being made; its size is settled last.
struct PrefillChunk {
    Sequence* sequence = nullptr;
    int32_t tokens = 0;
};

// The plan being made.
struct Draft {
    explicit Draft(const SchedulerConfig& config) : budget(config) {}

    StepPlan plan;
    TimeNs now = 0;
    StepBudget budget;
    std::vector<PrefillChunk> chunks;
    std::vector<RowInFlight> rows;
    bool out_of_pages = false;  // a running sequence found no page: nobody is admitted in this step
};

struct Scheduler::Impl {
    Impl(SchedulerConfig scheduler_config, KvCache& kv_cache);

    // scheduler.cc
    Status fits(const Request& request) const;
    void submit(Request request);
    void finish(Sequence& sequence, int32_t n_tokens, TimeNs now);
    Sequence* find_live(RequestId id);
    void check_integrity() const;

    // lifecycle.cc
    TokenEvent event_of(const Sequence& sequence, TimeNs now) const;
    void end_with_event(Sequence& sequence, FinishReason reason, TimeNs now);
    void end(Sequence& sequence, FinishReason reason);  // the sequence may be gone afterwards
    void count_outputs(Sequence& sequence);
    void count_finished(FinishReason reason);
    void expire(TimeNs now);
    void settle(Sequence& sequence);  // after a commit: carries out what waited for the rows in flight
    void preempt(Sequence& sequence);
    void evict(Sequence& sequence);
    void leave_slot(Sequence& sequence);
    void drop(Sequence& sequence);
    void remove_running(Sequence& sequence);

    // planning.cc
    std::optional<StepPlan> next(TimeNs now);
    int32_t decode_allowance() const;
    bool may_admit(const Draft& draft) const;
    void plan_decodes(Draft& draft, int32_t token_limit);
    void plan_decode(Draft& draft, Sequence& sequence, int32_t drafts);
    bool reserve(Sequence& sequence, int32_t length);
    void plan_prefills(Draft& draft);
    static int32_t chunk_size(const Draft& draft, const Sequence& sequence, bool others);
    static void add_chunk(Draft& draft, Sequence& sequence, int32_t tokens);
    static void grow_chunks(Draft& draft);
    void emit_chunks(Draft& draft);
    void emit_row(Draft& draft, Sequence& sequence, StepRow row);

    // admission.cc
    void admit(Draft& draft);
    bool admit_front(Draft& draft);
    void enter_slot(Draft& draft, Sequence& sequence, CacheMatch match, const std::vector<PageId>& fresh);

    // commit.cc
    void commit(const StepResult& result, TimeNs now);
    void commit_row(const RowInFlight& row, const RowResult& result, TimeNs now);
    void commit_tokens(const RowInFlight& row, const RowResult& result, TimeNs now);
    void publish(Sequence& sequence);

    const SchedulerConfig config;
    KvCache& cache;
    const int32_t pages_total;
    std::unordered_map<RequestId, std::unique_ptr<Sequence>> sequences;  // the ended ones in flight included
    std::vector<Sequence*> running;  // kRunning and kPreempting, sorted by RunsBefore
    WaitingQueue waiting;
    Slots slots;
    std::set<std::pair<TimeNs, RequestId>> deadlines;  // of live requests that have one
    std::deque<PlanInFlight> in_flight;
    std::vector<TokenEvent> events;
    SchedulerStats counters;  // the counters alone; stats() adds the gauges
    int64_t next_arrival = 0;
    uint64_t next_step = 1;
    uint64_t next_row = 1;
    int32_t draining = 0;  // sequences whose pages come back when their rows in flight are committed
    // The head of the queue found no room, and none has come back since: not worth hashing its prompt again.
    bool admission_stalled = false;
};

}  // namespace tessera

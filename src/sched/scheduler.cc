#include "sched/scheduler.h"

#include <algorithm>
#include <fmt/format.h>

#include "base/check.h"
#include "sched/internal/state.h"

namespace tessera {

Scheduler::Impl::Impl(SchedulerConfig scheduler_config, KvCache& kv_cache)
    : config(std::move(scheduler_config)),
      cache(kv_cache),
      pages_total(cache.stats().pages_total),
      slots(config.max_num_seqs) {
    check(config.max_num_seqs >= 1, "scheduler: max_num_seqs must be at least 1");
    check(config.max_num_batched_tokens >= 1, "scheduler: max_num_batched_tokens must be at least 1");
    check(config.max_model_len >= 2, "scheduler: max_model_len must be at least 2");
    check(config.steps_in_flight >= 1, "scheduler: steps_in_flight must be at least 1");
    check(config.draft_tokens_max >= 0, "scheduler: draft_tokens_max must not be negative");
}

Status Scheduler::Impl::fits(const Request& request) const {
    const auto prompt = static_cast<int64_t>(request.prompt.size());
    const int32_t max_tokens = request.sampling.max_tokens;
    if (prompt == 0) {
        return invalid_argument("the prompt has 0 tokens; at least 1 is needed");
    }
    if (max_tokens < 1) {
        return invalid_argument(fmt::format("max_tokens is {}; at least 1 is needed", max_tokens));
    }
    if (prompt >= config.max_model_len) {
        return invalid_argument(
            fmt::format("the prompt has {} tokens, and the context of {} tokens must leave room for one more",
                        prompt, config.max_model_len));
    }
    const int64_t length = std::min<int64_t>(prompt + max_tokens, config.max_model_len);
    if (pages_for(length) > pages_total) {
        return invalid_argument(fmt::format(
            "the prompt's {} tokens and up to {} output tokens need {} KV pages of {} tokens, and the "
            "pool has {}",
            prompt, length - prompt, pages_for(length), kPageTokens, pages_total));
    }
    return {};
}

void Scheduler::Impl::submit(Request request) {
    check(request.id != 0 && !sequences.contains(request.id), "scheduler: a request id was used twice");
    auto owned = std::make_unique<Sequence>();
    Sequence& sequence = *owned;
    sequence.arrival = next_arrival++;
    sequence.root = root_key(config.identity, request.cache_salt);
    if (!request.sampling.ignore_eos) {
        sequence.stop_ids = config.eos_ids;
    }
    const auto& own = request.sampling.stop_ids;
    sequence.stop_ids.insert(sequence.stop_ids.end(), own.begin(), own.end());
    sequence.tokens = std::move(request.prompt);
    sequence.prompt_tokens = sequence.length();
    sequence.length_max = static_cast<int32_t>(std::min<int64_t>(
        int64_t{sequence.prompt_tokens} + request.sampling.max_tokens, config.max_model_len));
    if (request.deadline != 0) {
        deadlines.emplace(request.deadline, request.id);
    }
    sequence.request = std::move(request);
    sequences.emplace(sequence.request.id, std::move(owned));
    waiting.push(sequence);
    admission_stalled = false;
}

Sequence* Scheduler::Impl::find_live(RequestId id) {
    const auto found = sequences.find(id);
    return found == sequences.end() || found->second->phase == Phase::kEnded ? nullptr : found->second.get();
}

// The pages that hold a token past the first n outputs leave the prefix index again: a page is published when
// it is complete, which may be before the stop string in its text is found.
void Scheduler::Impl::finish(Sequence& sequence, int32_t n_tokens, TimeNs now) {
    const int32_t kept = sequence.prompt_tokens + std::clamp(n_tokens, 0, sequence.outputs());
    const auto pages_kept = static_cast<size_t>(kept / kPageTokens);
    if (pages_kept < sequence.keys.size()) {
        cache.withdraw(std::span(sequence.keys).subspan(pages_kept));
    }
    const bool waits = sequence.phase == Phase::kWaiting;  // preempted: the queue counts its tokens
    if (waits) {
        waiting.remove(sequence);
    }
    sequence.tokens.resize(static_cast<size_t>(kept));
    if (waits) {
        waiting.push(sequence);
    }
    end_with_event(sequence, FinishReason::kStop, now);
}

void Scheduler::Impl::check_integrity() const {
    check(std::is_sorted(running.begin(), running.end(), RunsBefore()), "running sequences out of order");
    std::unordered_map<const Sequence*, int32_t> rows;
    for (const PlanInFlight& plan : in_flight) {
        for (const RowInFlight& row : plan.rows) {
            ++rows[row.sequence];
        }
    }
    std::set<SlotId> slots_held;
    std::set<PageId> pages_held;
    size_t in_running = 0;
    int32_t in_waiting = 0;
    int32_t in_draining = 0;
    for (const auto& [id, sequence] : sequences) {
        const Phase phase = sequence->phase;
        in_waiting += phase == Phase::kWaiting;
        in_running += phase == Phase::kRunning || phase == Phase::kPreempting;
        in_draining += phase == Phase::kPreempting || phase == Phase::kEnded;
        check(sequence->rows_in_flight == (rows.contains(sequence.get()) ? rows[sequence.get()] : 0),
              "a sequence's rows in flight are miscounted");
        check((phase == Phase::kWaiting) == (sequence->slot < 0),
              "a slot without a stay, or a stay without one");
        check(phase != Phase::kWaiting || sequence->pages.empty(), "a waiting sequence holds pages");
        check(sequence->slot < 0 || slots_held.insert(sequence->slot).second, "a slot is held twice");
        pages_held.insert(sequence->pages.begin(), sequence->pages.end());
    }
    check(in_running == running.size() && in_waiting == waiting.size() && in_draining == draining,
          "a sequence is in the wrong list");
    check(slots.free_count() + static_cast<int32_t>(slots_held.size()) == config.max_num_seqs,
          "a slot is lost");
    check(static_cast<int32_t>(pages_held.size()) == cache.stats().pages_referenced, "a page is lost");
}

Scheduler::Scheduler(SchedulerConfig config, KvCache& cache)
    : impl_(std::make_unique<Impl>(std::move(config), cache)) {}

Scheduler::~Scheduler() = default;

Status Scheduler::fits(const Request& request) const {
    return impl_->fits(request);
}

void Scheduler::submit(Request request, TimeNs) {
    check(fits(request).ok(), "scheduler: a request that cannot fit was submitted");
    impl_->submit(std::move(request));
}

void Scheduler::cancel(RequestId id, FinishReason reason, TimeNs now) {
    check(reason != FinishReason::kNone, "scheduler: cancel() needs a reason");
    if (Sequence* sequence = impl_->find_live(id)) {
        impl_->end_with_event(*sequence, reason, now);
    }
}

void Scheduler::finish(RequestId id, int32_t n_tokens, TimeNs now) {
    if (Sequence* sequence = impl_->find_live(id)) {
        impl_->finish(*sequence, n_tokens, now);
    }
}

std::optional<StepPlan> Scheduler::next(TimeNs now) {
    return impl_->next(now);
}

void Scheduler::commit(const StepResult& result, TimeNs now) {
    impl_->commit(result, now);
}

std::vector<TokenEvent> Scheduler::take_events() {
    return std::exchange(impl_->events, {});
}

bool Scheduler::idle() const {
    return impl_->sequences.empty() && impl_->in_flight.empty();
}

bool Scheduler::has_work() const {
    return !impl_->running.empty() || !impl_->waiting.empty();
}

SchedulerStats Scheduler::stats() const {
    SchedulerStats stats = impl_->counters;
    stats.running = static_cast<int32_t>(impl_->running.size());
    stats.waiting = impl_->waiting.size();
    stats.slots_free = impl_->slots.free_count();
    stats.waiting_tokens = impl_->waiting.tokens();
    return stats;
}

void Scheduler::check_integrity() const {
    impl_->check_integrity();
}

}  // namespace tessera

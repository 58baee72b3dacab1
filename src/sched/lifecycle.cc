// How a sequence ends, is preempted, and gives its slot and pages back. Nothing that a step in flight may
// touch is given back: such a sequence is `draining` until its last row is committed.
#include <algorithm>

#include "base/check.h"
#include "sched/internal/state.h"

namespace tessera {

TokenEvent Scheduler::Impl::event_of(const Sequence& sequence, TimeNs now) const {
    TokenEvent event;
    event.id = sequence.request.id;
    event.prompt_tokens = sequence.prompt_tokens;
    event.cached_tokens = sequence.cached_tokens;
    event.scheduled = sequence.scheduled;
    event.time = now;
    return event;
}

void Scheduler::Impl::end_with_event(Sequence& sequence, FinishReason reason, TimeNs now) {
    events.push_back(event_of(sequence, now));
    events.back().finish = reason;
    end(sequence, reason);
}

void Scheduler::Impl::end(Sequence& sequence, FinishReason reason) {
    count_finished(reason);
    count_outputs(sequence);
    deadlines.erase({sequence.request.deadline, sequence.request.id});
    admission_stalled = false;
    if (sequence.phase == Phase::kWaiting) {
        waiting.remove(sequence);
        drop(sequence);
        return;
    }
    remove_running(sequence);
    draining += sequence.phase != Phase::kPreempting;  // that one drains already
    sequence.phase = Phase::kEnded;
    settle(sequence);
}

// A request's latest tokens enter the counter when its next ones come or when it ends, so that tokens which a
// stop string discards were, as a rule, never counted and the counter does not step back.
void Scheduler::Impl::count_outputs(Sequence& sequence) {
    counters.generated_tokens += sequence.outputs() - sequence.counted_outputs;
    sequence.counted_outputs = sequence.outputs();
}

void Scheduler::Impl::count_finished(FinishReason reason) {
    switch (reason) {
        case FinishReason::kNone:
            check(false, "a request ended without a reason");
            return;
        case FinishReason::kStop:
            ++counters.finished_stop;
            return;
        case FinishReason::kLength:
            ++counters.finished_length;
            return;
        case FinishReason::kAbort:
            ++counters.finished_abort;
            return;
        case FinishReason::kDeadline:
            ++counters.finished_deadline;
            return;
        case FinishReason::kError:
            ++counters.finished_error;
            return;
    }
}

void Scheduler::Impl::expire(TimeNs now) {
    while (!deadlines.empty() && deadlines.begin()->first <= now) {
        Sequence* sequence = find_live(deadlines.begin()->second);
        check(sequence != nullptr, "the deadline of a request that has ended");
        end_with_event(*sequence, FinishReason::kDeadline, now);
    }
}

void Scheduler::Impl::settle(Sequence& sequence) {
    if (sequence.rows_in_flight > 0) {
        return;
    }
    if (sequence.phase == Phase::kPreempting) {
        --draining;
        evict(sequence);
    } else if (sequence.phase == Phase::kEnded) {
        --draining;
        leave_slot(sequence);
        drop(sequence);
    }
}

// The tokens of its rows in flight are valid and are kept; only then do slot and pages go.
void Scheduler::Impl::preempt(Sequence& sequence) {
    sequence.phase = Phase::kPreempting;
    ++draining;
    settle(sequence);
}

void Scheduler::Impl::evict(Sequence& sequence) {
    ++counters.preemptions;
    remove_running(sequence);
    leave_slot(sequence);
    sequence.phase = Phase::kWaiting;
    waiting.push(sequence);
}

void Scheduler::Impl::leave_slot(Sequence& sequence) {
    cache.release(sequence.pages);
    sequence.pages.clear();
    slots.give_back(sequence.slot);
    sequence.slot = -1;
    admission_stalled = false;
}

void Scheduler::Impl::drop(Sequence& sequence) {
    const RequestId id = sequence.request.id;  // a copy: the sequence dies before the call returns
    sequences.erase(id);
}

void Scheduler::Impl::remove_running(Sequence& sequence) {
    const auto place = std::lower_bound(running.begin(), running.end(), &sequence, RunsBefore());
    check(place != running.end() && *place == &sequence, "removed a sequence that does not run");
    running.erase(place);
}

}  // namespace tessera

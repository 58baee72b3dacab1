// Admission: waiting requests get a slot, the cached prefix and all pages of their prefill, strictly in
// order, so that no large request is overtaken for ever by small ones.
#include <algorithm>
#include <tuple>

#include "base/check.h"
#include "sched/internal/state.h"

namespace tessera {

void Scheduler::Impl::admit(Draft& draft) {
    while (may_admit(draft) && draft.budget.prefill_limit(0) > 0 && admit_front(draft)) {
    }
}

bool Scheduler::Impl::admit_front(Draft& draft) {
    Sequence& sequence = waiting.front();
    CacheMatch match = cache.match(sequence.root, sequence.tokens);
    const int32_t fresh = pages_for(sequence.length()) - static_cast<int32_t>(match.pages.size());
    // Each running sequence keeps room for one more page: else the newcomer would be preempted at once.
    const auto kept = static_cast<int32_t>(running.size());
    const bool room = cache.available() >= fresh + kept;
    // The longer context of a cached prefix may leave no time for a token in this step.
    if (!room || draft.budget.prefill_limit(match.tokens) == 0) {
        cache.release(match.pages);
        admission_stalled = !room;
        return false;
    }
    const auto pages = cache.allocate(fresh);
    check(pages.has_value(), "scheduler: available pages could not be allocated");
    waiting.remove(sequence);
    enter_slot(draft, sequence, std::move(match), *pages);
    add_chunk(draft, sequence, chunk_size(draft, sequence, may_admit(draft)));
    return true;
}

void Scheduler::Impl::enter_slot(Draft& draft, Sequence& sequence, CacheMatch match,
                                 const std::vector<PageId>& fresh) {
    if (!sequence.admitted_before) {
        sequence.admitted_before = true;
        sequence.scheduled = draft.now;
        sequence.cached_tokens = match.tokens;
        cache.count_lookup(sequence.prompt_tokens, match.tokens);
        counters.prompt_tokens += sequence.prompt_tokens;
        counters.cached_tokens += match.tokens;
    }
    sequence.phase = Phase::kRunning;
    std::tie(sequence.slot, sequence.generation) = slots.take();
    sequence.pages = std::move(match.pages);
    sequence.pages.insert(sequence.pages.end(), fresh.begin(), fresh.end());
    sequence.keys = std::move(match.keys);
    sequence.pages_planned = 0;
    sequence.prefill_target = sequence.length();
    sequence.prefill_planned = sequence.computed = match.tokens;
    running.insert(std::lower_bound(running.begin(), running.end(), &sequence, RunsBefore()), &sequence);

    const auto prompt_end = sequence.tokens.begin() + sequence.prompt_tokens;
    draft.plan.inits.push_back({.slot = sequence.slot,
                                .generation = sequence.generation,
                                .sampling = sequence.request.sampling,
                                .stop_ids = sequence.stop_ids,
                                .prompt = {sequence.tokens.begin(), prompt_end},
                                .output = {prompt_end, sequence.tokens.end()}});
}

}  // namespace tessera

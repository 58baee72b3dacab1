// The plan of one step: decode rows, then prefill chunks of running sequences, then admission. A plan may be
// made while steps_in_flight - 1 others are uncommitted, so nothing here depends on tokens that are still to
// come.
#include <algorithm>

#include "base/check.h"
#include "sched/internal/state.h"

namespace tessera {
namespace {

// When decode rows could take the whole budget, this part of it is kept for prefill.
constexpr int32_t kPrefillReserveDivisor = 8;
// A prefill too long for one step shares it with those behind it, if both get at least this much.
constexpr int32_t kSharedChunkMin = kPageTokens;

}  // namespace

std::optional<StepPlan> Scheduler::Impl::next(TimeNs now) {
    check(static_cast<int32_t>(in_flight.size()) < config.steps_in_flight,
          "scheduler: too many plans in flight");
    expire(now);
    Draft draft(config);
    draft.now = now;
    plan_decodes(draft, decode_allowance());
    plan_prefills(draft);
    admit(draft);
    grow_chunks(draft);
    emit_chunks(draft);
    if (draft.rows.empty()) {
        plan_decodes(draft, config.max_num_batched_tokens);  // what was kept for prefill found no use
    }
    if (draft.rows.empty()) {
        check(!in_flight.empty() || (running.empty() && waiting.empty()),
              "scheduler: work waits and nothing can run");
        return std::nullopt;
    }
    draft.plan.step = next_step++;
    draft.plan.retired = slots.take_retired();
    draft.plan.token_count = config.max_num_batched_tokens - draft.budget.tokens_left();
    in_flight.push_back({.step = draft.plan.step, .rows = std::move(draft.rows)});
    return std::move(draft.plan);
}

int32_t Scheduler::Impl::decode_allowance() const {
    const int32_t budget = config.max_num_batched_tokens;
    const bool prefills = std::any_of(running.begin(), running.end(), [](const Sequence* sequence) {
        return sequence->phase == Phase::kRunning && sequence->prefilling();
    });
    if (!prefills && (waiting.empty() || slots.free_count() == 0 || admission_stalled)) {
        return budget;
    }
    if (budget == 1) {
        return static_cast<int32_t>(next_step % 2);  // turn and turn about
    }
    return budget - std::max(1, budget / kPrefillReserveDivisor);
}

bool Scheduler::Impl::may_admit(const Draft& draft) const {
    return !waiting.empty() && slots.free_count() > 0 && !admission_stalled && !draft.out_of_pages;
}

// Every running sequence past its prefill gets a row. If the limit is too small for that, those that waited
// longest come first; if it is too small for all drafts, each gets fewer.
void Scheduler::Impl::plan_decodes(Draft& draft, int32_t token_limit) {
    std::vector<Sequence*> rows;
    for (Sequence* sequence : running) {
        if (sequence->phase == Phase::kRunning && !sequence->prefilling() &&
            sequence->drafts_allowed() >= 0) {
            rows.push_back(sequence);
        }
    }
    const auto count = static_cast<int32_t>(rows.size());
    if (count > token_limit) {
        std::stable_sort(rows.begin(), rows.end(), [](const Sequence* a, const Sequence* b) {
            return a->last_planned < b->last_planned;
        });
    }
    const int32_t drafts = count == 0 ? 0 : std::clamp(token_limit / count - 1, 0, config.draft_tokens_max);
    const int32_t tokens_kept = draft.budget.tokens_left() - token_limit;
    for (Sequence* sequence : rows) {
        if (draft.budget.tokens_left() == tokens_kept) {
            return;
        }
        if (sequence->phase == Phase::kRunning) {  // it may have been preempted for one before it
            plan_decode(draft, *sequence, drafts);
        }
    }
}

void Scheduler::Impl::plan_decode(Draft& draft, Sequence& sequence, int32_t drafts) {
    drafts = std::min(drafts, sequence.drafts_allowed());
    const int32_t upper = sequence.position_upper();
    if (pages_for(upper + 1 + drafts) - static_cast<int32_t>(sequence.pages.size()) > cache.available()) {
        drafts = 0;  // nobody is preempted for a guess
    }
    if (!reserve(sequence, upper + 1 + drafts)) {
        draft.out_of_pages = true;
        return;
    }
    draft.budget.take_decode(1 + drafts, upper + 1 + drafts);
    StepRow row;
    row.kind = RowKind::kDecode;
    row.q_len_max = 1 + drafts;
    row.position_lower = sequence.position_lower();
    row.position_upper = upper;
    row.draft_count = drafts;
    emit_row(draft, sequence, std::move(row));
}

// Pages for `length` tokens. If the pool is exhausted, the last in order of all running sequences makes room,
// which may be this one itself. False: not in this step. The first in order is never preempted, so it always
// comes to its end, and fits() has made sure that it can.
bool Scheduler::Impl::reserve(Sequence& sequence, int32_t length) {
    const int32_t needed = pages_for(length) - static_cast<int32_t>(sequence.pages.size());
    if (needed <= 0) {
        return true;
    }
    for (;;) {
        if (const auto pages = cache.allocate(needed)) {
            sequence.pages.insert(sequence.pages.end(), pages->begin(), pages->end());
            return true;
        }
        if (draining > 0) {
            return false;  // pages will come back with a step in flight
        }
        Sequence& last = *running.back();  // none is kPreempting while nothing drains
        check(running.size() > 1, "scheduler: a sequence alone does not fit the pool");
        preempt(last);
        if (&last == &sequence) {
            return false;
        }
    }
}

// By arrival; one too long for this step leaves half to those behind it.
void Scheduler::Impl::plan_prefills(Draft& draft) {
    std::vector<Sequence*> prefills;
    for (Sequence* sequence : running) {
        if (sequence->phase == Phase::kRunning && sequence->prefilling()) {
            prefills.push_back(sequence);
        }
    }
    for (size_t i = 0; i < prefills.size(); ++i) {
        const bool others = i + 1 < prefills.size() || may_admit(draft);
        const int32_t tokens = chunk_size(draft, *prefills[i], others);
        if (tokens == 0) {
            return;
        }
        add_chunk(draft, *prefills[i], tokens);
    }
}

int32_t Scheduler::Impl::chunk_size(const Draft& draft, const Sequence& sequence, bool others) {
    const int32_t limit = draft.budget.prefill_limit(sequence.prefill_planned);
    if (sequence.prefill_left() <= limit) {
        return sequence.prefill_left();
    }
    return others && limit >= 2 * kSharedChunkMin ? limit - limit / 2 : limit;
}

void Scheduler::Impl::add_chunk(Draft& draft, Sequence& sequence, int32_t tokens) {
    draft.budget.take_prefill(tokens, sequence.prefill_planned);
    draft.chunks.push_back({.sequence = &sequence, .tokens = tokens});
}

// What was left for those behind and found no use goes to the first again.
void Scheduler::Impl::grow_chunks(Draft& draft) {
    for (PrefillChunk& chunk : draft.chunks) {
        const int32_t missing = chunk.sequence->prefill_left() - chunk.tokens;
        const int32_t context = chunk.sequence->prefill_planned + chunk.tokens;
        const int32_t more = std::min(missing, draft.budget.prefill_limit(context));
        draft.budget.take_prefill(more, context);
        chunk.tokens += more;
    }
}

void Scheduler::Impl::emit_chunks(Draft& draft) {
    for (const PrefillChunk& chunk : draft.chunks) {
        Sequence& sequence = *chunk.sequence;
        StepRow row;
        row.kind = chunk.tokens == sequence.prefill_left() ? RowKind::kPrefillLast : RowKind::kPrefill;
        row.q_len_max = chunk.tokens;
        row.position_lower = row.position_upper = sequence.prefill_planned;
        const auto first = sequence.tokens.begin() + sequence.prefill_planned;
        row.tokens.assign(first, first + chunk.tokens);
        sequence.prefill_planned += chunk.tokens;
        emit_row(draft, sequence, std::move(row));
    }
}

void Scheduler::Impl::emit_row(Draft& draft, Sequence& sequence, StepRow row) {
    row.slot = sequence.slot;
    row.generation = sequence.generation;
    row.page_table_length = sequence.pages_planned;
    row.new_pages.assign(sequence.pages.begin() + sequence.pages_planned, sequence.pages.end());
    sequence.pages_planned = static_cast<int32_t>(sequence.pages.size());
    sequence.last_planned = next_row++;
    ++sequence.rows_in_flight;
    if (row.kind != RowKind::kPrefill) {
        ++sequence.samples_in_flight;
        sequence.tokens_in_flight_max += 1 + row.draft_count;
    }
    draft.rows.push_back(
        {.sequence = &sequence, .kind = row.kind, .tokens = row.q_len_max, .drafts = row.draft_count});
    draft.plan.rows.push_back(std::move(row));
}

}  // namespace tessera

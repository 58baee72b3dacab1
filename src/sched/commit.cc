// What a step's result changes: lengths become certain, complete pages are published, tokens become events.
#include <algorithm>

#include "base/check.h"
#include "sched/internal/state.h"

namespace tessera {

void Scheduler::Impl::commit(const StepResult& result, TimeNs now) {
    check(!in_flight.empty() && in_flight.front().step == result.step, "scheduler: results out of order");
    const PlanInFlight plan = std::move(in_flight.front());
    in_flight.pop_front();
    check(plan.rows.size() == result.rows.size(), "scheduler: a result with other rows than its plan");
    for (size_t i = 0; i < plan.rows.size(); ++i) {
        commit_row(plan.rows[i], result.rows[i], now);
    }
}

void Scheduler::Impl::commit_row(const RowInFlight& row, const RowResult& result, TimeNs now) {
    Sequence& sequence = *row.sequence;
    check(result.slot == sequence.slot && result.generation == sequence.generation,
          "scheduler: a result row of another slot or generation than planned");
    const bool samples = row.kind != RowKind::kPrefill;
    --sequence.rows_in_flight;
    sequence.samples_in_flight -= samples;
    sequence.tokens_in_flight_max -= samples ? 1 + row.drafts : 0;
    if (sequence.phase == Phase::kEnded) {
        settle(sequence);
        return;
    }
    if (!result.error.empty()) {
        cache.withdraw(sequence.keys);  // whatever failed here may have failed in the pages before
        events.push_back(event_of(sequence, now));
        events.back().finish = FinishReason::kError;
        events.back().error = result.error;
        end(sequence, FinishReason::kError);
        return;
    }
    const auto tokens = static_cast<int32_t>(result.tokens.size());
    check(samples ? tokens >= 1 && tokens <= 1 + row.drafts : tokens == 0,
          "scheduler: a row with too many tokens");
    if (samples) {
        commit_tokens(row, result, now);
    } else {
        sequence.computed += row.tokens;
        publish(sequence);
        settle(sequence);
    }
}

void Scheduler::Impl::commit_tokens(const RowInFlight& row, const RowResult& result, TimeNs now) {
    Sequence& sequence = *row.sequence;
    count_outputs(sequence);
    TokenEvent event = event_of(sequence, now);
    for (const GeneratedToken& generated : result.tokens) {
        const bool may_stop = sequence.outputs() >= sequence.request.sampling.min_tokens;
        sequence.tokens.push_back(generated.token);
        event.tokens.push_back(generated);
        if (may_stop && sequence.stops_at(generated.token)) {
            event.finish = FinishReason::kStop;
            event.stop_token = generated.token;
        } else if (sequence.length() >= sequence.length_max) {
            event.finish = FinishReason::kLength;
        }
        if (event.finish != FinishReason::kNone) {
            break;  // drafts accepted past the end are no part of the answer
        }
    }
    sequence.computed = sequence.length() - 1;  // the newest token is computed by the next row
    publish(sequence);
    const FinishReason reason = event.finish;
    events.push_back(std::move(event));
    if (reason == FinishReason::kNone) {
        settle(sequence);
    } else {
        end(sequence, reason);
    }
}

void Scheduler::Impl::publish(Sequence& sequence) {
    const size_t page_tokens = kPageTokens;
    const size_t complete = static_cast<size_t>(sequence.computed) / page_tokens;
    const std::span<const TokenId> tokens(sequence.tokens);
    for (size_t page = sequence.keys.size(); page < complete; ++page) {
        const PageKey& previous = page == 0 ? sequence.root : sequence.keys[page - 1];
        sequence.keys.push_back(next_key(previous, tokens.subspan(page * page_tokens, page_tokens)));
        cache.commit(sequence.pages[page], sequence.keys.back());
    }
}

}  // namespace tessera

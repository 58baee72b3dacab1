// Sequence: all that the scheduler knows of one request, from submit() until the last step that could touch
// its slot and pages has been committed.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "cache/kv_cache.h"
#include "types/request.h"
#include "types/step_plan.h"

namespace tessera {

enum class Phase : uint8_t {
    kWaiting,     // in the waiting queue; holds no slot and no page
    kRunning,     // has a slot and pages
    kPreempting,  // the same, but is planned no more: evicted when its rows in flight are committed
    kEnded,       // its last event is out; slot and pages wait for its rows in flight
};

inline int32_t pages_for(int64_t tokens) {
    return static_cast<int32_t>((tokens + kPageTokens - 1) / kPageTokens);
}

struct Sequence {
    Request request;  // its prompt has moved to `tokens`
    int64_t arrival = 0;
    PageKey root;
    std::vector<TokenId> stop_ids;
    int32_t prompt_tokens = 0;
    int32_t length_max = 0;       // prompt + output, at most
    std::vector<TokenId> tokens;  // prompt and committed output
    Phase phase = Phase::kWaiting;

    bool admitted_before = false;
    TimeNs scheduled = 0;         // when it first got a slot
    int32_t cached_tokens = 0;    // of the prompt, at the first admission
    int32_t counted_outputs = 0;  // outputs already in SchedulerStats::generated_tokens

    // The present stay in a slot. prefill_target tokens are computed as prefill (prompt and the outputs kept
    // over a preemption), of which prefill_planned are cached, computed or in flight.
    SlotId slot = -1;
    uint32_t generation = 0;
    std::vector<PageId> pages;
    std::vector<PageKey> keys;  // of the published head of `pages`; kept over a preemption, for finish()
    int32_t pages_planned = 0;  // pages that the runner has been told of
    int32_t prefill_target = 0;
    int32_t prefill_planned = 0;
    int32_t computed = 0;       // tokens whose KV is certain: at most this many are hashed
    uint64_t last_planned = 0;  // the latest row's number, over all rows ever planned

    // Rows planned and not committed; among them those that sample, and the tokens these may bring at most.
    int32_t rows_in_flight = 0;
    int32_t samples_in_flight = 0;
    int32_t tokens_in_flight_max = 0;

    int32_t length() const { return static_cast<int32_t>(tokens.size()); }
    int32_t outputs() const { return length() - prompt_tokens; }
    bool prefilling() const { return prefill_planned < prefill_target; }
    int32_t prefill_left() const { return prefill_target - prefill_planned; }

    // Where the next decode row computes: the position of the slot's last token, which no step has computed
    // yet. Each row in flight brings one token at least and 1 + its drafts at most.
    int32_t position_lower() const { return length() + samples_in_flight - 1; }
    int32_t position_upper() const { return length() + tokens_in_flight_max - 1; }
    // Drafts that a decode row planned now may carry so that no outcome passes length_max: negative means
    // that the tokens in flight may already be the last ones, and that the row has to wait for them.
    int32_t drafts_allowed() const { return length_max - 2 - position_upper(); }

    bool stops_at(TokenId token) const {
        return std::find(stop_ids.begin(), stop_ids.end(), token) != stop_ids.end();
    }
};

// Who comes first: lower priority value, then earlier arrival. A total order.
struct RunsBefore {
    bool operator()(const Sequence* a, const Sequence* b) const {
        if (a->request.priority != b->request.priority) {
            return a->request.priority < b->request.priority;
        }
        return a->arrival < b->arrival;
    }
};

}  // namespace tessera

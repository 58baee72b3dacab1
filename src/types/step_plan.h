// StepPlan and StepResult: the border between the scheduler, which decides what runs, and the runner, which
// runs it. One plan is one forward pass. Plans are executed in order; a plan may be made while the one before
// it still runs, so a row never carries what only that step's result will tell: token ids, true lengths and
// accepted drafts live in the runner's slots.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "types/page_format.h"
#include "types/token_event.h"

namespace tessera {

using SlotId = int32_t;

enum class RowKind : uint8_t {
    kPrefill,      // `tokens` are computed; no token is sampled
    kPrefillLast,  // the same, and the sampler makes the first output token
    kDecode,       // computes the slot's last token (and its drafts) and samples the next
};

struct StepRow {
    SlotId slot = 0;
    uint32_t generation =
        0;  // raised each time the slot is given to another request (or re-given after preemption)
    RowKind kind = RowKind::kDecode;
    int32_t q_len_max = 1;  // tokens computed, at most (a decode row: 1 + drafts)
    // The row's first token has a position in [position_lower, position_upper] (equal for prefill).
    int32_t position_lower = 0;
    int32_t position_upper = 0;
    int32_t draft_count = 0;
    std::vector<TokenId> tokens;  // prefill: q_len_max ids
    // Pages added to the slot's page table by this plan, in order; the table's length before them.
    int32_t page_table_length = 0;
    std::vector<PageId> new_pages;
};

// State of a slot that a request takes over, applied before the rows of the plan that carries it.
struct SlotInit {
    SlotId slot = 0;
    uint32_t generation = 0;
    SamplingParams sampling;
    std::vector<TokenId> stop_ids;  // every id that may end the request (EOS unless ignored, and its own)
    std::vector<TokenId> prompt;    // for the repetition penalty and for MTP
    // Output tokens made before a preemption: they are recomputed as prefill and keep their place in
    // penalties, in the seed's counter and in the forced tokens.
    std::vector<TokenId> output;
};

struct StepPlan {
    uint64_t step = 0;
    std::vector<SlotInit> inits;
    std::vector<StepRow> rows;
    std::vector<SlotId>
        retired;              // slots whose tenancy is over, applied before `inits` (a slot may be in both)
    int32_t token_count = 0;  // sum of q_len_max
};

struct RowResult {
    SlotId slot = 0;
    uint32_t generation = 0;
    std::vector<GeneratedToken> tokens;  // none for kPrefill, 1 to 1 + draft_count otherwise
    std::string error;                   // not empty: this row failed, the others did not
};

struct StepResult {
    uint64_t step = 0;
    std::vector<RowResult> rows;  // in the plan's order
    TimeNs started = 0;
    TimeNs finished = 0;
};

}  // namespace tessera

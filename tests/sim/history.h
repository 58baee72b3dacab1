// One random history: requests come, are cancelled, finished and timed out while plans are made, run and
// committed in every order that the contract allows; every plan, event and counter is checked. A violation
// aborts (check).
#pragma once

#include <cstdint>

namespace tessera::sim {

// What happened, summed over histories: a simulator that never reaches a situation proves nothing about it.
struct Coverage {
    int64_t steps = 0;
    int64_t requests = 0;
    int64_t generated = 0;
    int64_t preemptions = 0;
    int64_t cached_tokens = 0;
    int64_t evicted_pages = 0;
    int64_t finished_stop = 0, finished_length = 0, finished_abort = 0, finished_deadline = 0,
            finished_error = 0;
    int64_t cut_answers = 0;       // finish() with tokens past it
    int64_t overlapped_plans = 0;  // made while another was uncommitted
    int64_t drafted_rows = 0;
};

void run_history(uint64_t seed, Coverage& coverage);

}  // namespace tessera::sim

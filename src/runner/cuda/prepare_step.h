// The first kernel of a step: what the rows of a plan become once their slots' state is known.
#pragma once

#include <cstdint>

#include <cuda_runtime_api.h>

namespace tessera {

// Everything lies in device memory; the counts are those of the launch (a captured decode step pads with
// empty rows).
struct PrepareStepArgs {
    int32_t rows = 0;         // decode rows, then prefill rows
    int32_t decode_rows = 0;  // one token each: the slot's last
    int32_t pages_max = 0;
    // By row, from the plan.
    const int32_t* slots = nullptr;          // < 0: an empty row
    const int32_t* positions = nullptr;      // of the row's first token; < 0 in an empty row
    const int32_t* first_tokens = nullptr;   // [rows + 1]: row b's tokens are [b] .. [b + 1] - 1 of the batch
    const int32_t* table_lengths = nullptr;  // of the slot's page table before this step
    const int32_t* first_new_pages =
        nullptr;  // [rows + 1]: row b's new pages are [b] .. [b + 1] - 1 of new_pages
    const int32_t* new_pages = nullptr;
    const int32_t* prefill_tokens = nullptr;  // of the prefill rows, in order
    // By slot.
    const int32_t* last_tokens = nullptr;
    int32_t* slot_tables = nullptr;  // [slots, pages_max]; grows by the new pages
    // The batch.
    int32_t* tokens = nullptr;           // [T]
    int32_t* token_positions = nullptr;  // [T]
    int32_t* token_rows = nullptr;       // [T]
    int32_t* row_tables = nullptr;       // [rows, pages_max]
};
void prepare_step_cuda(cudaStream_t stream, const PrepareStepArgs& args);

}  // namespace tessera

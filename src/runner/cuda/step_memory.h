// The memory of a CUDA runner: what slots keep on the device, and how a step's inputs and results travel.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "device/cuda/buffer.h"
#include "ops/sample/cuda/sample_cuda.h"
#include "types/page_format.h"

namespace tessera {

struct StepSizes {
    int32_t rows = 0;    // of a plan, and slots
    int32_t tokens = 0;  // of a plan
    int32_t pages = 0;   // of a slot's table
    int64_t vocab = 0;
};

// The longest prompt and output of one tenant.
inline int64_t history_words(const StepSizes& sizes) {
    return 2 * kPageTokens * sizes.pages;
}

// What the host tells a step, as int32 arrays: row r of a plan at [r]. The same layout on the host and on the
// device, so that one copy takes each part.
struct StepInputs {
    StepInputs() = default;
    StepInputs(int32_t* base, const StepSizes& sizes);
    static int64_t words(const StepSizes& sizes);

    // The first part, copied whole with every step: 8 rows + 3 words.
    int32_t* slots = nullptr;
    int32_t* positions = nullptr;
    int32_t* first_tokens = nullptr;  // [rows + 1]
    int32_t* table_lengths = nullptr;
    int32_t* first_new_pages = nullptr;     // [rows + 1]
    int32_t* prefill_first_rows = nullptr;  // [prefill rows + 1]
    int32_t* logit_rows = nullptr;
    int32_t* sample_slots = nullptr;
    int64_t row_words = 0;
    // These as far as they are used.
    int32_t* new_pages = nullptr;       // [rows * pages]
    int32_t* prefill_tokens = nullptr;  // [tokens]
};

// Page-locked memory of one step in flight.
struct StepStaging {
    PinnedBuffer input_memory, result_memory, init_memory, history_memory;
    StepInputs inputs;
    SampleRowResult* results = nullptr;  // [rows]
    // What new tenants bring, by their number in the plan.
    SampleSlot* slots = nullptr;   // [rows]
    int32_t* bias_ids = nullptr;   // [rows][kSampleBiasMax]
    float* bias_values = nullptr;  // [rows][kSampleBiasMax]
    int32_t* forced = nullptr;     // [rows][kSampleForcedMax]
    int32_t count = 0;             // of tenants so far
    int32_t* history = nullptr;    // [history_words()]: prompts and outputs of tenants with penalties
    int64_t history_used = 0;

    static Result<StepStaging> allocate(const StepSizes& sizes);
};

// Device memory of the slots and of the step that runs.
struct StepMemory {
    std::vector<DeviceBuffer> buffers;
    SampleSlots samples;
    std::byte* sample_exchange = nullptr;  // of rows as many as slots
    int32_t* bias_ids = nullptr;
    float* bias_values = nullptr;
    int32_t* forced = nullptr;
    int32_t* slot_tables = nullptr;  // [slots, pages]
    int32_t* history = nullptr;      // [history_words()]: a tenant's prompt and output, for the penalties
    StepInputs inputs;
    int32_t* tokens = nullptr;
    int32_t* token_positions = nullptr;
    int32_t* token_rows = nullptr;
    int32_t* row_tables = nullptr;       // [rows, pages]
    SampleRowResult* results = nullptr;  // [rows]

    static Result<StepMemory> allocate(const StepSizes& sizes, MemoryBudget& budget);
};

}  // namespace tessera

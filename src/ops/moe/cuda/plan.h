// What goes before the experts' kernel: the plan, and with grouped experts x in e4m3 and in the order of the
// rows.
#pragma once

#include <cstdint>

#include <cuda_runtime_api.h>

#include "ops/moe/cuda/experts.cuh"

namespace tessera::cuda {

inline constexpr int kExpertsMax = 1024;

struct PlanArgs {
    const int32_t* chosen = nullptr;  // [tokens, k]
    int32_t tokens = 0;
    int32_t k = 0;
    int32_t experts = 0;
    int32_t tile_max = 0;
    int32_t* counters = nullptr;  // set to 0
    int32_t counters_count = 0;
    int32_t* more_counters = nullptr;  // the same
    int32_t more_counters_count = 0;
    int32_t early_items = 0;          // see ExpertsArgs
    int32_t* routed_items = nullptr;  // [2]
    ExpertsItem* items = nullptr;
    ExpertsItem* down_items = nullptr;
    int32_t* row_source = nullptr;  // [tokens * k]
    int32_t* slots = nullptr;       // [tokens * k]: the sorted row of each pair, -1 without one
    // Beside the plan, by further blocks: x in e4m3 with a scale for each token. x null: not.
    const uint16_t* x = nullptr;  // [tokens, hidden] bfloat16
    uint8_t* x8 = nullptr;
    float* x_scale = nullptr;
    int32_t hidden = 0;
};

void launch_plan(cudaStream_t stream, const PlanArgs& args);

// x in the order of the rows, `row_bytes` a multiple of 16: with it the kernel of grouped experts reads x in
// boxes, which hides more latency than copies through the list. Writes rows * row_bytes.
struct SortRowsArgs {
    const uint8_t* x = nullptr;
    const int32_t* slots = nullptr;  // [pairs]: the row of each, or -1
    int32_t pairs = 0;
    int32_t k = 0;
    int32_t row_bytes = 0;
    uint8_t* sorted = nullptr;
};

void launch_sort_rows(cudaStream_t stream, const SortRowsArgs& args);

}  // namespace tessera::cuda

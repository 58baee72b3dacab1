// The mixture of narrow int4 experts for some hundred tokens: one kernel without a plan.
#pragma once

#include <cstdint>

#include <cuda_runtime_api.h>

#include "ops/moe/cuda/narrow.h"

namespace tessera::cuda {

// Rows of an item: one of these.
inline constexpr int kNarrowShortRows = 32;
inline constexpr int kNarrowSomeRows = 48;
inline constexpr int kNarrowManyRows = 64;

struct NarrowW4Args {
    NarrowChoices choices;
    int32_t k = 0;
    int32_t hidden = 0;
    bool early = false;                // the choices are there before the kernel before this one has ended
    const uint8_t* x = nullptr;        // [tokens, hidden] e4m3
    const float* x_scale = nullptr;    // [tokens]
    const uint8_t* gate_up = nullptr;  // [experts, w4_gate_up_bytes()]
    const uint8_t* down = nullptr;     // [experts, w4_down_bytes()]
    uint8_t* out = nullptr;            // [pairs, hidden] bfloat16
};

// What goes before: x in e4m3 with a scale for each token, and counters of another launch.
struct NarrowInputsArgs {
    const uint16_t* x = nullptr;  // [tokens, hidden] bfloat16
    uint8_t* x8 = nullptr;
    float* x_scale = nullptr;
    int32_t hidden = 0;
    int32_t* counters = nullptr;  // set to 0
    int32_t counters_count = 0;
};

// Whether the kernel takes so many.
bool narrow_w4_serves(const NarrowSizes& sizes, int rows_max, int multiprocessors);
void launch_narrow_inputs(cudaStream_t stream, const NarrowInputsArgs& args, int64_t tokens);
void launch_narrow_w4(cudaStream_t stream, const NarrowW4Args& args, int rows_max, int multiprocessors);

}  // namespace tessera::cuda

// The mixture of narrow int4 experts for a few tokens: gate and up, then down with the sums over each
// token's.
#pragma once

#include <cstdint>

#include <cuda_runtime_api.h>

#include "ops/moe/cuda/narrow_w4.h"

namespace tessera::cuda {

inline constexpr int kNarrowFewTokens = 16;  // at most
inline constexpr int kNarrowFewK = 8;
inline constexpr int kNarrowFewExperts = 256;
inline constexpr int kNarrowFewHidden = 4096;

struct NarrowFewArgs {
    const int32_t* chosen = nullptr;  // [tokens, k]
    int32_t tokens = 0;
    int32_t k = 0;
    int32_t experts = 0;
    int32_t hidden = 0;
    bool early = false;                     // `chosen` is there before the kernel before the first has ended
    const uint8_t* x = nullptr;             // [tokens, hidden] e4m3
    const float* x_scale = nullptr;         // [tokens]
    const uint8_t* gate_up = nullptr;       // [experts, w4_gate_up_bytes()]
    const uint8_t* down = nullptr;          // [experts, w4_down_bytes()]
    uint16_t* act = nullptr;                // [tokens * k, kNarrowWidth] bfloat16
    const float* expert_weights = nullptr;  // [tokens, k]
    const uint16_t* more = nullptr;         // [tokens, hidden] bfloat16: the shared expert's; may be null
    uint16_t* y = nullptr;                  // [tokens, hidden] bfloat16
};

// Whether the kernels take so many.
bool narrow_few_serves(const NarrowSizes& sizes);
void launch_narrow_few(cudaStream_t stream, const NarrowFewArgs& args, int multiprocessors);

}  // namespace tessera::cuda

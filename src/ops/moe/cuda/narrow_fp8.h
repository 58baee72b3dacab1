// The mixture of narrow fp8 experts for some tokens: one kernel without a plan.
#pragma once

#include <cstdint>

#include <cuda.h>
#include <cuda_runtime_api.h>

#include "ops/moe/cuda/narrow.h"

namespace tessera::cuda {

// Of the routed experts or of the shared one, whose width is kNarrowWidth as well.
struct NarrowFp8Side {
    CUtensorMap gate_up;                      // MoeCudaMaps::gate_up_thirds
    CUtensorMap down;                         // MoeCudaMaps::down, with down_pairs()
    const uint8_t* x = nullptr;               // [tokens, hidden] e4m3
    float input_scale = 1;                    // of x
    const float* gate_up_scale = nullptr;     // [experts, 2]
    const float* down_scale = nullptr;        // [experts]
    const float* down_input_scale = nullptr;  // [experts]
};

struct NarrowFp8Args {
    NarrowChoices choices;
    int32_t k = 0;
    int32_t hidden = 0;
    uint8_t* out = nullptr;  // [pairs + shared_tokens, hidden] bfloat16
    NarrowFp8Side routed;
    NarrowFp8Side shared;
};

// Whether the kernel takes so many; shared_tokens as in NarrowChoices.
bool narrow_fp8_serves(const NarrowSizes& sizes, int64_t shared_tokens, int multiprocessors);
void launch_narrow_fp8(cudaStream_t stream, const NarrowFp8Args& args, int multiprocessors);

}  // namespace tessera::cuda

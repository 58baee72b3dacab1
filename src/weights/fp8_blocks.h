// Widens e4m3 weights in blocks, for the places that compute in bfloat16.
#pragma once

#include <cstdint>

#include "weights/model_weights.h"

namespace tessera {

// out [rows, cols]: each e4m3 value times the scale of its block, to the nearest bfloat16. Pure; any thread.
// REQUIRES: linear.blocks.
void fp8_blocks_to_bf16(const LinearWeights& linear, uint16_t* out);

}  // namespace tessera

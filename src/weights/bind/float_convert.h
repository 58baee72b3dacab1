// Widening of the two 16-bit float types, for the few small tensors that are wanted as float32.
#pragma once

#include <cstdint>

#include "weights/model_weights.h"

namespace tessera {

float float_from_bfloat16(uint16_t bits);
float float_from_float16(uint16_t bits);
// All elements of a kBFloat16 or kFloat16 view into out[rows * cols].
void widen(const WeightView& view, float* out);

}  // namespace tessera

// Conversions between float32 and the narrow float types, for the few small tensors that need them here.
#pragma once

#include <cstdint>

#include "weights/model_weights.h"

namespace tessera {

float float_from_bfloat16(uint16_t bits);
float float_from_float16(uint16_t bits);
uint16_t bfloat16_bits(float value);  // to nearest even
float e4m3_value(uint8_t code);
// All elements of a kBFloat16 or kFloat16 view into out[rows * cols].
void widen(const WeightView& view, float* out);

}  // namespace tessera

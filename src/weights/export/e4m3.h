// float32 -> FP8 e4m3 codes (the "fn" kind: no infinities, largest 448, smallest 2^-9).
#pragma once

#include <cstdint>

namespace tessera {

inline constexpr float kE4m3Largest = 448.0f;

// The code of the nearest e4m3 value: ties to even, saturating at 448. REQUIRES: not a NaN.
uint8_t e4m3_code(float value);

// The scale of a per-tensor e4m3 form whose largest magnitude is `largest`: positive and finite.
float e4m3_scale(float largest);

}  // namespace tessera

// What the layouts of grouped weights (w4_layout.h, w8_layout.h) have in common. A group is 128 inputs, which
// share a scale; a unit is 64 rows of weights: 64 outputs of down, or gate and up of 32 outputs (in each 16
// rows 8 of gate, then 8 of up), as wgmma's A side has them.
#pragma once

#include <cstdint>

namespace tessera {

inline constexpr int64_t kGroupedInputs = 128;
inline constexpr int64_t kGroupedUnitRows = 64;
inline constexpr int64_t kGroupedWidthMax = 2048;
inline constexpr int64_t kGroupedHiddenMax = 8192;

// Whether the device's kernels take experts of these sizes.
constexpr bool grouped_sizes_fit(int64_t hidden, int64_t width) {
    return hidden % kGroupedInputs == 0 && hidden <= kGroupedHiddenMax && width % kGroupedUnitRows == 0 &&
           width <= kGroupedWidthMax;
}

// The unit's row of output `output` of gate; up's is 8 further. The unit is output / 32.
constexpr int64_t grouped_gate_row(int64_t output) {
    return output % 32 / 8 * 16 + output % 8;
}

}  // namespace tessera

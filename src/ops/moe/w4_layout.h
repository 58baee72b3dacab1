// The int4 weights of experts as the CUDA kernel reads them: shuffled once at load, so that a thread's
// 16-byte load from shared memory is 32 of its weights in the order of wgmma's registers, and a code becomes
// e4m3 within 7 integer instructions for 8 weights.
//
// A unit (grouped_layout.h) is stored group by group of 128 inputs (the last may be 64), each
//   [4 warps][8][2] bfloat16 scales of the rows r and r + 8 of each 16,
//   [inputs / 64][4 warps][32 lanes] 16 bytes of codes.
// Byte b of word w of a lane: low four bits = row lane / 4, high four = row lane / 4 + 8 (of the warp's 16),
// at input 16 w + 4 (lane % 4) + b of the 64. A code -8 .. 7 is stored as its sign in bit 0 and, above it,
// the code or (negative) its complement.
#pragma once

#include <cstdint>

#include "ops/moe/grouped_layout.h"

namespace tessera {

inline constexpr int64_t kW4ScaleBytes = 128;                      // of a unit and group
inline constexpr int64_t kW4GroupBytes = kW4ScaleBytes + 64 * 64;  // of a whole group

// Bytes of a unit; inputs a multiple of 64.
constexpr int64_t w4_unit_bytes(int64_t inputs) {
    return (inputs + kGroupedInputs - 1) / kGroupedInputs * kW4ScaleBytes + inputs * kGroupedUnitRows / 2;
}
// Of an expert's gate and up together, and of its down. width a multiple of 64, hidden of 128.
constexpr int64_t w4_gate_up_bytes(int64_t hidden, int64_t width) {
    return width / 32 * w4_unit_bytes(hidden);
}
constexpr int64_t w4_down_bytes(int64_t hidden, int64_t width) {
    return hidden / kGroupedUnitRows * w4_unit_bytes(width);
}

// Where the code of (row of the unit, input) lies in a unit, and its scale.
struct W4Place {
    int64_t byte = 0;
    int shift = 0;      // of the nibble
    int64_t scale = 0;  // byte
};
constexpr W4Place w4_place(int64_t row, int64_t input) {
    const int64_t group = input / kGroupedInputs * kW4GroupBytes;
    const int64_t warp = row / 16;
    const int64_t lane = row % 8 * 4 + input % 16 / 4;
    return {group + kW4ScaleBytes + input % kGroupedInputs / 64 * 2048 + warp * 512 + lane * 16 +
                input % 64 / 16 * 4 + input % 4,
            row % 16 < 8 ? 0 : 4, group + (warp * 8 + row % 8) * 4 + row % 16 / 8 * 2};
}
// The code of a stored nibble.
constexpr int w4_code(int stored) {
    return (stored & 1) != 0 ? ~(stored >> 1) : stored >> 1;
}

// Rows of codes [rows, inputs / 2] (low nibble = even input, two's complement) with scales [rows, groups].
struct W4Source {
    const uint8_t* codes = nullptr;
    const uint16_t* scales = nullptr;
};

// One unit from row `first` on, of 64 rows of down; or, with `up`, of 32 rows of gate and the same of up.
struct W4Unit {
    W4Source weight;  // down, or gate
    W4Source up;      // codes null: none
    int64_t first = 0;
    int64_t inputs = 0;
    uint8_t* to = nullptr;  // w4_unit_bytes(inputs)
};
void w4_pack_unit(const W4Unit& unit);

// The four bits that stand for a code.
constexpr uint8_t w4_stored(int code) {
    return static_cast<uint8_t>(code < 0 ? ~code << 1 | 1 : code << 1) & 15;
}

}  // namespace tessera

// The e4m3 weights of experts with a scale for each block of 128 x 128, as the CUDA kernel reads them:
// shuffled once at load, so that a thread's 16-byte load from shared memory is four registers of wgmma's A
// side.
//
// A unit (grouped_layout.h) is stored group by group of 128 inputs, zeros past the last one, each
//   [4] float32: the scale of rows r < 8 of each 16 rows, that of the others, two unused,
//   [4 steps of 32 inputs][4 warps][32 lanes] 16 bytes of weights.
// Byte b of word w of a lane: row lane / 4 + 8 (w % 2) of the warp's 16, at input 16 (w / 2) + 4 (lane % 4) +
// b of the step.
#pragma once

#include <cstdint>

#include "ops/moe/grouped_layout.h"

namespace tessera {

inline constexpr int64_t kW8ScaleBytes = 16;  // of a unit and group
inline constexpr int64_t kW8GroupBytes = kW8ScaleBytes + kGroupedUnitRows * kGroupedInputs;

constexpr int64_t w8_unit_bytes(int64_t inputs) {
    return (inputs + kGroupedInputs - 1) / kGroupedInputs * kW8GroupBytes;
}
// Of an expert's gate and up together, and of its down. width a multiple of 32, hidden of 64.
constexpr int64_t w8_gate_up_bytes(int64_t hidden, int64_t width) {
    return width / 32 * w8_unit_bytes(hidden);
}
constexpr int64_t w8_down_bytes(int64_t hidden, int64_t width) {
    return hidden / kGroupedUnitRows * w8_unit_bytes(width);
}

// Where the weight of (row of the unit, input) lies in a unit, and its scale.
struct W8Place {
    int64_t byte = 0;
    int64_t scale = 0;  // byte
};
constexpr W8Place w8_place(int64_t row, int64_t input) {
    const int64_t group = input / kGroupedInputs * kW8GroupBytes;
    const int64_t lane = row % 8 * 4 + input % 16 / 4;
    const int64_t word = row % 16 / 8 + input % 32 / 16 * 2;
    return {group + kW8ScaleBytes + input % kGroupedInputs / 32 * 2048 + row / 16 * 512 + lane * 16 +
                word * 4 + input % 4,
            group + row % 16 / 8 * 4};
}

// A matrix [rows, inputs] of e4m3, and its scales [ceil(rows / 128), ceil(inputs / 128)].
struct W8Source {
    const uint8_t* weights = nullptr;
    const float* scales = nullptr;
};

// One unit from row `first` on, of 64 rows of down; or, with `up`, of 32 rows of gate and the same of up.
// REQUIRES: first a multiple of the rows that it takes.
struct W8Unit {
    W8Source weight;  // down, or gate
    W8Source up;      // weights null: none
    int64_t first = 0;
    int64_t inputs = 0;
    uint8_t* to = nullptr;  // w8_unit_bytes(inputs)
};
void w8_pack_unit(const W8Unit& unit);

}  // namespace tessera

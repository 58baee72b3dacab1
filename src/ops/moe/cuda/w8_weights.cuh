// The e4m3 weights of a thread: a group of 128 inputs of 64 rows (w8_layout.h), as the A side of wgmma.
#pragma once

#include <cstdint>

#include "ops/common/cuda/shared_access.cuh"
#include "ops/moe/w8_layout.h"

namespace tessera::cuda {

struct W8Weights {
    uint32_t registers[16];
    float2 scales;  // of rows lane / 4 and lane / 4 + 8

    __device__ __forceinline__ float2 row_scales() const { return scales; }
};

// What experts_grouped.cuh needs to know of its weights.
struct W8Units {
    using Raw = W8Weights;
    using Weights = W8Weights;
    static constexpr int kGroupBytes = static_cast<int>(kW8GroupBytes);
    static constexpr float kScale = 1;  // what the sums must still be multiplied with
    // Whether two blocks of a multiprocessor leave registers to load the next group's weights, 18 a thread,
    // during a product.
    static constexpr bool kAhead = false;

    __device__ static int64_t bytes(int64_t inputs) { return w8_unit_bytes(inputs); }
    // The whole of a short group too: what lay there before may be NaN, and so its product with zeros.
    __device__ static uint32_t bytes_of_group(int /*left*/) { return static_cast<uint32_t>(kW8GroupBytes); }
    // A group of a unit in shared memory.
    __device__ __forceinline__ static Raw load(uint32_t unit) {
        const uint32_t weights = unit + static_cast<uint32_t>(kW8ScaleBytes) + threadIdx.x % 128 * 16;
        Raw raw;
        raw.scales = load_shared_float2(unit);
#pragma unroll
        for (int step = 0; step < 4; ++step) {
            const uint4 four = load_shared_16(weights + step * 2048);
            raw.registers[4 * step] = four.x;
            raw.registers[4 * step + 1] = four.y;
            raw.registers[4 * step + 2] = four.z;
            raw.registers[4 * step + 3] = four.w;
        }
        return raw;
    }
    __device__ __forceinline__ static Weights convert(const Raw& raw) { return raw; }
};

}  // namespace tessera::cuda

// The int4 weights of a thread: a group of 128 inputs of 64 rows (w4_layout.h), as the A side of wgmma.
#pragma once

#include <cstdint>

#include "ops/common/cuda/convert.cuh"
#include "ops/common/cuda/shared_access.cuh"
#include "ops/moe/w4_layout.h"

namespace tessera::cuda {

// Eight stored codes to two registers of four e4m3, each code * 2^-8: doubled, a magnitude up to 8 is the
// bits of 2^-9 times it; a negative one is 2 * (its complement + 1), with the sign.
__device__ __forceinline__ void w4_expand(uint32_t word, uint32_t& low, uint32_t& high) {
    constexpr uint32_t kSigns = 0x01010101u;
    constexpr uint32_t kCodes = 0x0E0E0E0Eu;
    const uint32_t up = word >> 4;
    low = (word & kSigns) * 130u + (word & kCodes);
    high = (up & kSigns) * 130u + (up & kCodes);
}
inline constexpr float kW4Unit = 256;

// A thread's weights of a group: 64 rows by 128 inputs of the warpgroup.
struct W4Raw {
    uint4 codes[2];
    uint32_t scales = 0;  // of rows lane / 4 and lane / 4 + 8
};
// From shared memory: the scales of rows in fours of threads, and 16 bytes a thread of either half's codes,
// which lie `half_bytes` apart.
__device__ __forceinline__ W4Raw w4_load(uint32_t thread, uint32_t scales, uint32_t codes,
                                         uint32_t half_bytes) {
    W4Raw raw;
    raw.scales = load_shared_4(scales + thread / 4 * 4);
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        raw.codes[half] = load_shared_16(codes + half * half_bytes + thread * 16);
    }
    return raw;
}
// The same as e4m3, four steps of four registers.
struct W4Weights {
    uint32_t registers[16];
    uint32_t scales = 0;

    __device__ __forceinline__ float2 row_scales() const {
        return make_float2(low_bf16(scales), high_bf16(scales));
    }
};
__device__ __forceinline__ W4Weights w4_convert(const W4Raw& raw) {
    W4Weights out;
    out.scales = raw.scales;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const uint4 codes = raw.codes[half];
        w4_expand(codes.x, out.registers[8 * half], out.registers[8 * half + 1]);
        w4_expand(codes.y, out.registers[8 * half + 2], out.registers[8 * half + 3]);
        w4_expand(codes.z, out.registers[8 * half + 4], out.registers[8 * half + 5]);
        w4_expand(codes.w, out.registers[8 * half + 6], out.registers[8 * half + 7]);
    }
    // Here, not after the wait that follows.
#pragma unroll
    for (uint32_t& value : out.registers) {
        asm volatile("" : "+r"(value));
    }
    return out;
}

// A whole group of a unit in shared memory.
__device__ __forceinline__ W4Raw w4_load_unit(uint32_t unit) {
    return w4_load(threadIdx.x % 128, unit, unit + static_cast<uint32_t>(kW4ScaleBytes), 2048);
}

// What experts_grouped.cuh needs to know of its weights.
struct W4Units {
    using Raw = W4Raw;
    using Weights = W4Weights;
    static constexpr int kGroupBytes = static_cast<int>(kW4GroupBytes);
    static constexpr float kScale = kW4Unit;  // what the sums must still be multiplied with
    // Whether two blocks of a multiprocessor leave registers to load the next group's weights, 9 a thread,
    // during a product.
    static constexpr bool kAhead = true;

    __device__ static int64_t bytes(int64_t inputs) { return w4_unit_bytes(inputs); }
    // Of the group in which so many inputs are left.
    __device__ static uint32_t bytes_of_group(int left) {
        return left > 64 ? static_cast<uint32_t>(kW4GroupBytes) : static_cast<uint32_t>(kW4ScaleBytes + 2048);
    }
    __device__ __forceinline__ static Raw load(uint32_t unit) { return w4_load_unit(unit); }
    __device__ __forceinline__ static Weights convert(const Raw& raw) { return w4_convert(raw); }
};

}  // namespace tessera::cuda

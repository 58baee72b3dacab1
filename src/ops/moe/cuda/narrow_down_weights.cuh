// A thread's weights of a unit of down of a narrow int4 expert.
#pragma once

#include <cstdint>

#include "ops/common/cuda/shared_access.cuh"
#include "ops/moe/cuda/grouped_products.cuh"
#include "ops/moe/cuda/narrow_w4.h"
#include "ops/moe/cuda/w4_weights.cuh"

namespace tessera::cuda {

inline constexpr int kNarrowGroupBytes = static_cast<int>(kW4GroupBytes);
inline constexpr int kNarrowDownBytes = static_cast<int>(w4_unit_bytes(kNarrowWidth));

// A thread's weights of a unit of down: a whole group and half of one.
struct NarrowRaw {
    W4Raw first;
    uint4 half;
    uint32_t half_scales = 0;
};
__device__ __forceinline__ NarrowRaw narrow_load_down(uint32_t slot) {
    const uint32_t thread = threadIdx.x % 128;
    const uint32_t rest = slot + kNarrowGroupBytes;
    NarrowRaw raw{.first = w4_load_unit(slot)};
    raw.half_scales = load_shared_4(rest + thread / 4 * 4);
    raw.half = load_shared_16(rest + static_cast<uint32_t>(kW4ScaleBytes) + thread * 16);
    return raw;
}
struct NarrowDown {
    W4Weights first;
    uint32_t half[8];
    uint32_t half_scales = 0;
};
__device__ __forceinline__ NarrowDown narrow_convert(const NarrowRaw& raw) {
    NarrowDown out{.first = w4_convert(raw.first)};
    out.half_scales = raw.half_scales;
    w4_expand(raw.half.x, out.half[0], out.half[1]);
    w4_expand(raw.half.y, out.half[2], out.half[3]);
    w4_expand(raw.half.z, out.half[4], out.half[5]);
    w4_expand(raw.half.w, out.half[6], out.half[7]);
#pragma unroll
    for (uint32_t& value : out.half) {
        asm volatile("" : "+r"(value));
    }
    return out;
}
// As grouped_hold().
__device__ __forceinline__ void narrow_hold(const NarrowDown& weights) {
    grouped_hold(weights.first);
#pragma unroll
    for (const uint32_t value : weights.half) {
        asm volatile("" ::"r"(value) : "memory");
    }
}

}  // namespace tessera::cuda

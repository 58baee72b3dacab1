// The products of a warpgroup's int4 weights with the tokens' rows, group by group: what the kernels of many
// tokens share.
#pragma once

#include <cstdint>

#include "ops/common/cuda/async_copy.cuh"
#include "ops/common/cuda/convert.cuh"
#include "ops/common/cuda/shared_access.cuh"
#include "ops/moe/cuda/experts.cuh"
#include "ops/moe/cuda/w4_mma.cuh"
#include "ops/moe/cuda/w4_weights.cuh"
#include "ops/moe/w4_layout.h"

namespace tessera::cuda {

// A whole group of a unit.
__device__ __forceinline__ W4Raw w4_load_unit(uint32_t unit) {
    return w4_load(threadIdx.x % 128, unit, unit + static_cast<uint32_t>(kW4ScaleBytes), 2048);
}

// part = the group's products.
template <int N>
__device__ __forceinline__ void w4_issue(float (&part)[N / 2], const W4Weights& weights, uint64_t rows) {
    mma_pin(part);
    mma_begin();
#pragma unroll
    for (int step = 0; step < 4; ++step) {
        mma_weights_fp8(part, weights.registers + 4 * step, rows + step * kMmaStepBytes / 16,
                        step > 0 ? 1 : 0);
    }
    mma_commit();
}

template <int N>
__device__ __forceinline__ void w4_promote(float (&sums)[N / 2], float (&part)[N / 2], uint32_t scales) {
    mma_pin(part);
    const float low = low_bf16(scales);
    const float high = high_bf16(scales);
#pragma unroll
    for (int i = 0; i < N / 2; ++i) {
        sums[i] = fmaf(i % 4 < 2 ? low : high, part[i], sums[i]);
    }
}

template <int Stages>
__device__ __forceinline__ void w4_release(ExpertsRing<Stages>& ring) {
    __syncwarp();
    barrier_arrive_for_all(ring.empty(), threadIdx.x % 32 == 0);
    ring.advance();
}

// A thread's two of a row of floats: of columns 8 j + 2 (lane % 4) and the next.
__device__ __forceinline__ float2 w4_column_pair(uint32_t floats, int j) {
    const uint32_t at = floats + (8 * j + threadIdx.x % 4 * 2) * 4;
    const float low = load_shared_float(at);
    return make_float2(low, load_shared_float(at + 4));
}
// The rows' scales as the sums of a thread need them.
__device__ __forceinline__ float2 w4_row_scales(uint32_t scales, int j) {
    const float2 pair = w4_column_pair(scales, j);
    return make_float2(pair.x * kW4Unit, pair.y * kW4Unit);
}

}  // namespace tessera::cuda

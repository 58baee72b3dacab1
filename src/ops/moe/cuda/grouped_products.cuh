// The products of a warpgroup's weights in registers with the tokens' rows, group of 128 inputs by group:
// what the kernels of many tokens share.
#pragma once

#include <cstdint>

#include "ops/common/cuda/async_copy.cuh"
#include "ops/common/cuda/convert.cuh"
#include "ops/common/cuda/shared_access.cuh"
#include "ops/moe/cuda/experts.cuh"
#include "ops/moe/cuda/w4_mma.cuh"

namespace tessera::cuda {

// The operand of rows in shared memory from `address` on, the same for the whole warp. The compiler knows so
// by the shuffle, and makes the steps' operands by additions in uniform registers; otherwise it brings each
// there by two instructions, for which its product waits.
__device__ __forceinline__ uint64_t grouped_rows(uint32_t address) {
    return mma_descriptor(__shfl_sync(0xFFFFFFFFu, address, 0));
}

// part = the group's products.
template <int N, typename Weights>
__device__ __forceinline__ void grouped_issue(float (&part)[N / 2], const Weights& weights, uint64_t rows) {
    mma_pin(part);
    mma_begin();
#pragma unroll
    for (int step = 0; step < 4; ++step) {
        mma_weights_fp8(part, weights.registers + 4 * step, rows + step * kMmaStepBytes / 16,
                        step > 0 ? 1 : 0);
    }
    mma_commit();
}

// sums += scale * part, with the scales of the thread's two rows of weights.
template <int N, typename Weights>
__device__ __forceinline__ void grouped_promote(float (&sums)[N / 2], float (&part)[N / 2],
                                                const Weights& weights) {
    mma_pin(part);
    const float2 scale = weights.row_scales();
#pragma unroll
    for (int i = 0; i < N / 2; ++i) {
        sums[i] = fmaf(i % 4 < 2 ? scale.x : scale.y, part[i], sums[i]);
    }
}

template <int Stages>
__device__ __forceinline__ void grouped_release(ExpertsRing<Stages>& ring) {
    __syncwarp();
    barrier_arrive_for_all(ring.empty(), threadIdx.x % 32 == 0);
    ring.advance();
}

// A thread's two of a row of floats: of columns 8 j + 2 (lane % 4) and the next.
__device__ __forceinline__ float2 column_pair(uint32_t floats, int j) {
    const uint32_t at = floats + (8 * j + threadIdx.x % 4 * 2) * 4;
    const float low = load_shared_float(at);
    return make_float2(low, load_shared_float(at + 4));
}
}  // namespace tessera::cuda

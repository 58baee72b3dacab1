// e4m3 act of 64 rows of weights through shared memory: 32 outputs, 8 by each warp of four, where rows r and
// r + 8 of each 16 are gate and up of one output. A matrix has 8 outputs by 8 pairs of neighbouring tokens;
// a row of the buffer both tokens of a pair, byte by byte, 64 bytes.
#pragma once

#include <cstdint>

#include "ops/common/cuda/convert.cuh"
#include "ops/common/cuda/shared_access.cuh"
#include "ops/moe/cuda/experts.cuh"
#include "ops/moe/cuda/swiglu.cuh"

namespace tessera::cuda {

__device__ __forceinline__ uint32_t act_pairs_place(int row, int piece) {
    return static_cast<uint32_t>(row * 64 + ((piece ^ ((row >> 1) & 3)) << 4));
}
// Where a lane's row of matrix j is stored, from the buffer on.
__device__ __forceinline__ uint32_t act_pairs_put(int j) {
    return act_pairs_place(8 * j + static_cast<int>(threadIdx.x % 8),
                           static_cast<int>(threadIdx.x % 128 / 32));
}

// This thread's part of the matrix of 16 tokens, of whose sums it has 8: SwiGLU, rounded to bfloat16, then
// e4m3.
__device__ __forceinline__ uint32_t act_pairs_matrix(const float* sums, const ExpertsScales& scales) {
    uint32_t matrix = 0;
#pragma unroll
    for (int m = 0; m < 2; ++m) {
        const float* sum = sums + 4 * m;
        const uint32_t pair = pack_bf16(swiglu(sum[0] * scales.gate, sum[2] * scales.up),
                                        swiglu(sum[1] * scales.gate, sum[3] * scales.up));
        const uint32_t both =
            pack_e4m3(low_bf16(pair) * scales.inverse_output, high_bf16(pair) * scales.inverse_output);
        matrix |= both << 16 * m;
    }
    return matrix;
}

// The first token of a row of the buffer.
__device__ __forceinline__ int act_pairs_token(int row) {
    return row / 8 * 16 + row % 2 * 8 + row % 8 / 2 * 2;
}
// 16 outputs of both tokens of a row, the first or the second ones.
struct ActPair {
    uint4 even;
    uint4 odd;
};
__device__ __forceinline__ ActPair act_pairs_get(uint32_t buffer, int row, int half) {
    const uint4 a = load_shared_16(buffer + act_pairs_place(row, 2 * half));
    const uint4 b = load_shared_16(buffer + act_pairs_place(row, 2 * half + 1));
    const auto even = [](uint32_t low, uint32_t high) { return __byte_perm(low, high, 0x6420); };
    const auto odd = [](uint32_t low, uint32_t high) { return __byte_perm(low, high, 0x7531); };
    return {make_uint4(even(a.x, a.y), even(a.z, a.w), even(b.x, b.y), even(b.z, b.w)),
            make_uint4(odd(a.x, a.y), odd(a.z, a.w), odd(b.x, b.y), odd(b.z, b.w))};
}

}  // namespace tessera::cuda

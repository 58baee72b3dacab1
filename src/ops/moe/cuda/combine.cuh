// A token's sum over its experts: in the order of `chosen`, in float32; then the shared expert; then y.
#pragma once

#include <cstdint>

#include <cuda_bf16.h>

#include "ops/common/cuda/convert.cuh"
#include "ops/common/cuda/dependent_launch.cuh"

namespace tessera::cuda {

struct CombineArgs {
    const __nv_bfloat16* out = nullptr;  // [rows, hidden]
    const int32_t* slots = nullptr;      // [tokens, k]
    const float* weights = nullptr;      // [tokens, k]
    int32_t hidden = 0;
    int32_t k = 0;
    int32_t shared_row = -1;     // of token 0; -1 without a shared expert
    __nv_bfloat16* y = nullptr;  // [tokens, hidden]
};

// Eight columns of a token.
__device__ __forceinline__ void combine_columns(const CombineArgs& args, int token, int column) {
    float sum[8] = {};
#pragma unroll 8
    for (int i = 0; i < args.k; ++i) {
        const int row = args.slots[token * args.k + i];
        if (row >= 0) {
            float part[8];
            load_bf16x8(args.out + static_cast<int64_t>(row) * args.hidden + column, part);
            const float weight = args.weights[token * args.k + i];
#pragma unroll
            for (int c = 0; c < 8; ++c) {
                sum[c] = fmaf(weight, part[c], sum[c]);
            }
        }
    }
    if (args.shared_row >= 0) {
        float part[8];
        load_bf16x8(args.out + static_cast<int64_t>(args.shared_row + token) * args.hidden + column, part);
#pragma unroll
        for (int c = 0; c < 8; ++c) {
            sum[c] = round_bf16(sum[c]) + part[c];
        }
    }
    __nv_bfloat16* y = args.y + static_cast<int64_t>(token) * args.hidden + column;
    float residual[8];
    load_bf16x8(y, residual);
#pragma unroll
    for (int c = 0; c < 8; ++c) {
        residual[c] += round_bf16(sum[c]);
    }
    store_bf16x8(residual, y);
}

inline constexpr int kCombineThreads = 256;

// Reads k + 1 rows and y, writes y: tokens * (k + 3) * 2 * hidden bytes.
__global__ void __launch_bounds__(kCombineThreads) combine_kernel(CombineArgs args) {
    wait_for_previous_kernel();
    const int column = static_cast<int>(blockIdx.x * kCombineThreads + threadIdx.x) * 8;
    if (column < args.hidden) {
        combine_columns(args, static_cast<int>(blockIdx.y), column);
    }
}

}  // namespace tessera::cuda

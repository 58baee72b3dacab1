#include "base/check.h"
#include "device/cuda/cuda_check.h"
#include "ops/common/cuda/cache_policy.cuh"
#include "ops/common/cuda/convert.cuh"
#include "ops/common/cuda/dependent_launch.cuh"
#include "ops/moe/cuda/combine.h"

namespace tessera::cuda {
namespace {

// For the last time: the level-2 cache gives it up first. Asked for in the order of the text: the compiler
// would add a row before it asks for the next.
__device__ __forceinline__ uint4 load_row_piece(const __nv_bfloat16* from) {
    uint4 raw;
    asm volatile("ld.global.L1::no_allocate.L2::cache_hint.v4.u32 {%0, %1, %2, %3}, [%4], %5;"
                 : "=r"(raw.x), "=r"(raw.y), "=r"(raw.z), "=r"(raw.w)
                 : "l"(from), "l"(policy_to_leave()));
    return raw;
}

// 128 bytes of a row, which eight lanes have read: the level-2 cache need not write them to memory. `read`:
// what was made of them.
__device__ __forceinline__ void drop_line(const __nv_bfloat16* line, float read) {
    asm volatile("discard.global.L2 [%0], 128;" ::"l"(line), "f"(read) : "memory");
}

// Eight columns of a token. K rows at once are on their way; Own: rows are the pairs' own, so that they need
// not wait for `slots`.
template <int K, bool Own>
__device__ __forceinline__ void combine_columns(const CombineArgs& args, int token, int column) {
    const int32_t* slots = args.slots + static_cast<int64_t>(token) * args.k;
    const float* weights = args.weights + static_cast<int64_t>(token) * args.k;
    const auto load = [&args, column](int row) {
        return load_row_piece(args.out + static_cast<int64_t>(row) * args.hidden + column);
    };
    __nv_bfloat16* y = args.y + static_cast<int64_t>(token) * args.hidden + column;
    const uint4 before = *reinterpret_cast<const uint4*>(y);
    uint4 shared = make_uint4(0, 0, 0, 0);
    if (args.shared_row >= 0) {
        shared = load(args.shared_row + token);
    }
    float sum[8] = {};
    const int k = K > 1 ? K : args.k;
    const auto there = [&args](int slot) { return slot >= 0 && (!Own || slot < args.own_below); };
    for (int first = 0; first < k; first += K) {
        int row[K];  // or the id
        float shares[K];
        uint4 raw[K];
#pragma unroll
        for (int i = 0; i < K; ++i) {
            row[i] = slots[first + i];
            shares[i] = weights[first + i];
        }
#pragma unroll
        for (int i = 0; i < K; ++i) {
            raw[i] = Own ? load(token * k + first + i) : row[i] >= 0 ? load(row[i]) : make_uint4(0, 0, 0, 0);
        }
#pragma unroll
        for (int i = 0; i < K; ++i) {
            if (there(row[i])) {
                float part[8];
                unpack_bf16x8(raw[i], part);
#pragma unroll
                for (int c = 0; c < 8; ++c) {
                    sum[c] = fmaf(shares[i], part[c], sum[c]);
                }
            }
        }
    }
    if (args.shared_row >= 0) {
        float part[8];
        unpack_bf16x8(shared, part);
#pragma unroll
        for (int c = 0; c < 8; ++c) {
            sum[c] = round_bf16(sum[c]) + part[c];
        }
    }
    if (Own && args.drop_rows) {
        __syncwarp(0xFFu << threadIdx.x % 32 / 8 * 8);  // all eight lanes of a line have it
    }
    if (Own && args.drop_rows && threadIdx.x % 8 == 0) {
        for (int i = 0; i < k; ++i) {
            drop_line(args.out + static_cast<int64_t>(token * k + i) * args.hidden + column, sum[0]);
        }
        if (args.shared_row >= 0) {
            drop_line(args.out + static_cast<int64_t>(args.shared_row + token) * args.hidden + column,
                      sum[0]);
        }
    }
    float residual[8];
    unpack_bf16x8(before, residual);
#pragma unroll
    for (int c = 0; c < 8; ++c) {
        residual[c] += round_bf16(sum[c]);
    }
    store_bf16x8(residual, y);
}

inline constexpr int kCombineThreads = 128;

// Reads k + 1 rows and y, writes y: tokens * (k + 3) * 2 * hidden bytes. K: k, or 1 for any.
template <int K, bool Own>
__global__ void __launch_bounds__(kCombineThreads) combine_kernel(CombineArgs args) {
    wait_for_previous_kernel();
    let_next_kernel_start();
    const int column = static_cast<int>(blockIdx.x * kCombineThreads + threadIdx.x) * 8;
    if (column < args.hidden) {
        combine_columns<K, Own>(args, static_cast<int>(blockIdx.y), column);
    }
}

}  // namespace

void launch_combine(cudaStream_t stream, const CombineArgs& args, int64_t tokens) {
    check(!args.drop_rows || (args.own_below > 0 && args.hidden % 64 == 0),
          "moe: rows that are not the pairs' own, or no whole lines, cannot be dropped");
    const int64_t blocks = (args.hidden / 8 + kCombineThreads - 1) / kCombineThreads;
    const auto kernel = args.own_below > 0
                            ? (args.k == 8 ? combine_kernel<8, true> : combine_kernel<1, true>)
                            : (args.k == 8 ? combine_kernel<8, false> : combine_kernel<1, false>);
    cuda_check(launch_dependent({.grid = dim3(static_cast<unsigned>(blocks), static_cast<unsigned>(tokens)),
                                 .threads = kCombineThreads,
                                 .stream = stream},
                                kernel, args));
}

}  // namespace tessera::cuda

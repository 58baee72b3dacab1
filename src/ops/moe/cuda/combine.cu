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

// Eight columns of a token. K rows at once are on their way.
template <int K>
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
    for (int first = 0; first < k; first += K) {
        int rows[K];
        float shares[K];
        uint4 raw[K];
#pragma unroll
        for (int i = 0; i < K; ++i) {
            rows[i] = slots[first + i];
            shares[i] = weights[first + i];
        }
#pragma unroll
        for (int i = 0; i < K; ++i) {
            raw[i] = rows[i] >= 0 ? load(rows[i]) : make_uint4(0, 0, 0, 0);
        }
#pragma unroll
        for (int i = 0; i < K; ++i) {
            if (rows[i] >= 0) {
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
template <int K>
__global__ void __launch_bounds__(kCombineThreads) combine_kernel(CombineArgs args) {
    wait_for_previous_kernel();
    let_next_kernel_start();
    const int column = static_cast<int>(blockIdx.x * kCombineThreads + threadIdx.x) * 8;
    if (column < args.hidden) {
        combine_columns<K>(args, static_cast<int>(blockIdx.y), column);
    }
}

}  // namespace

void launch_combine(cudaStream_t stream, const CombineArgs& args, int64_t tokens) {
    const int64_t blocks = (args.hidden / 8 + kCombineThreads - 1) / kCombineThreads;
    cuda_check(launch_dependent({.grid = dim3(static_cast<unsigned>(blocks), static_cast<unsigned>(tokens)),
                                 .threads = kCombineThreads,
                                 .stream = stream},
                                args.k == 8 ? combine_kernel<8> : combine_kernel<1>, args));
}

}  // namespace tessera::cuda

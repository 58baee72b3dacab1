#include "base/check.h"
#include "device/cuda/cuda_check.h"
#include "ops/common/cuda/convert.cuh"
#include "ops/common/cuda/reduce.cuh"
#include "ops/router_topk/cuda/router_topk_cuda.h"

namespace tessera {
namespace {

using namespace cuda;

constexpr int kThreads = 128;
constexpr int kWarps = kThreads / kWarp;
constexpr int kVector = 8;

__device__ __forceinline__ void load_weight(const __nv_bfloat16* from, float (&to)[kVector]) {
    load_bf16x8(from, to);
}
__device__ __forceinline__ void load_weight(const float* from, float (&to)[kVector]) {
    const float4 low = reinterpret_cast<const float4*>(from)[0];
    const float4 high = reinterpret_cast<const float4*>(from)[1];
    to[0] = low.x, to[1] = low.y, to[2] = low.z, to[3] = low.w;
    to[4] = high.x, to[5] = high.y, to[6] = high.z, to[7] = high.w;
}

// Left sums at once, a power of two up to 32: lane l gets the sum of values[l / (32 / Left)], in values[0].
// Each has the bits that warp_reduce() gives, since the lanes are paired in the same order, for a fifth of
// the shuffles.
template <int Left, int Offset = kWarp / 2>
__device__ __forceinline__ void warp_sums(float* values) {
    if constexpr (Offset == 0) {
        return;
    } else if constexpr (Left == 1) {
        values[0] += __shfl_xor_sync(kFullWarp, values[0], Offset);
        warp_sums<1, Offset / 2>(values);
    } else {
        const bool upper = (threadIdx.x & Offset) != 0;
#pragma unroll
        for (int i = 0; i < Left / 2; ++i) {
            const float sent = upper ? values[i] : values[i + Left / 2];
            const float kept = upper ? values[i + Left / 2] : values[i];
            values[i] = kept + __shfl_xor_sync(kFullWarp, sent, Offset);
        }
        warp_sums<Left / 2, Offset / 2>(values);
    }
}

// Roofline at 192 experts of width 4096: one token reads 1.5 MB of bfloat16 weights (0.4 us); many tokens
// do 1.6 MFLOP each on the float32 units (60 TFLOP/s). A block makes the logits of Experts x Tokens; its
// threads split the width. Every tile size adds in the same order, so a token's logits do not depend on its
// company.
template <typename Weight, int Experts, int Tokens>
__global__ void __launch_bounds__(kThreads, 1) router_logits_kernel(RouterLogitsCudaArgs args) {
    __shared__ float partial[kWarps][Experts * Tokens];
    const int64_t expert0 = blockIdx.x * static_cast<int64_t>(Experts);
    const int64_t token0 = blockIdx.y * static_cast<int64_t>(Tokens);
    const Weight* weight = static_cast<const Weight*>(args.weight);
    float sums[Tokens * Experts] = {};
    for (int64_t column = threadIdx.x * kVector; column < args.width; column += kThreads * kVector) {
        float x[Tokens][kVector];
#pragma unroll
        for (int t = 0; t < Tokens; ++t) {
            const int64_t token = min(token0 + t, args.tokens - 1);
            load_bf16x8(args.x + token * args.x_stride + column, x[t]);
        }
#pragma unroll
        for (int e = 0; e < Experts; ++e) {
            float w[kVector];
            load_weight(weight + min(expert0 + e, args.experts - 1) * args.width + column, w);
#pragma unroll
            for (int t = 0; t < Tokens; ++t) {
#pragma unroll
                for (int i = 0; i < kVector; ++i) {
                    sums[t * Experts + e] = fmaf(w[i], x[t][i], sums[t * Experts + e]);
                }
            }
        }
    }
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
    const int warp = static_cast<int>(threadIdx.x) / kWarp;
    constexpr int kSums = Experts * Tokens;
    constexpr int kAtOnce = kSums < kWarp ? kSums : kWarp;
#pragma unroll
    for (int first = 0; first < kSums; first += kAtOnce) {
        warp_sums<kAtOnce>(sums + first);
        partial[warp][first + lane / (kWarp / kAtOnce)] = sums[first];  // lanes of one sum write the same
    }
    __syncthreads();
    const int64_t expert = expert0 + threadIdx.x % Experts;
    const int64_t token = token0 + threadIdx.x / Experts;
    if (threadIdx.x < Experts * Tokens && expert < args.experts && token < args.tokens) {
        float sum = partial[0][threadIdx.x];
#pragma unroll
        for (int w = 1; w < kWarps; ++w) {
            sum += partial[w][threadIdx.x];
        }
        args.logits[token * args.logits_stride + expert] = sum;
    }
}

template <typename Weight, int Experts, int Tokens>
void launch(cudaStream_t stream, const RouterLogitsCudaArgs& args) {
    const dim3 grid(static_cast<unsigned>((args.experts + Experts - 1) / Experts),
                    static_cast<unsigned>((args.tokens + Tokens - 1) / Tokens));
    router_logits_kernel<Weight, Experts, Tokens><<<grid, kThreads, 0, stream>>>(args);
    cuda_check_launch();
}

// Small tiles fill the machine while there are few tokens; large ones read less.
template <typename Weight>
void launch_tile(cudaStream_t stream, const RouterLogitsCudaArgs& args) {
    if (args.tokens <= 4) {
        launch<Weight, 2, 1>(stream, args);
    } else if (args.tokens <= 128) {
        launch<Weight, 4, 4>(stream, args);
    } else {
        launch<Weight, 8, 8>(stream, args);
    }
}

}  // namespace

void router_logits_cuda(cudaStream_t stream, const RouterLogitsCudaArgs& args) {
    check(args.width % kVector == 0 && args.x_stride % kVector == 0,
          "router_logits: width and x_stride must be multiples of 8");
    check(args.tokens <= 65535 * 4, "router_logits: at most 262140 tokens");
    if (args.tokens == 0) {
        return;
    }
    if (args.weight_dtype == DType::kFloat32) {
        launch_tile<float>(stream, args);
    } else {
        check(args.weight_dtype == DType::kBFloat16, "router_logits: weights must be bfloat16 or float32");
        launch_tile<__nv_bfloat16>(stream, args);
    }
}

}  // namespace tessera

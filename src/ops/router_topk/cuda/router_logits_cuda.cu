#include "base/check.h"
#include "device/cuda/cuda_check.h"
#include "ops/common/cuda/convert.cuh"
#include "ops/common/cuda/reduce.cuh"
#include "ops/router_topk/cuda/router_kernels.cuh"

namespace tessera {
namespace cuda {
namespace {

constexpr int kThreads = 128;
constexpr int kWarps = kThreads / kWarp;
constexpr int kVector = 8;
constexpr int kExperts = 4;
constexpr int kTokens = 4;

template <bool Low>
__device__ __forceinline__ void load_weight(const RouterLogitsCudaArgs& args, int64_t place,
                                            float (&to)[kVector]) {
    load_bf16x8(args.high + place, to);
    if constexpr (Low) {
        float low[kVector];
        load_bf16x8(args.low + place, low);
#pragma unroll
        for (int i = 0; i < kVector; ++i) {
            to[i] += low[i];  // exact
        }
    }
}

// For widths that the tensor-core kernels do not take. Roofline: 2 width operations a logit on the float32
// units (60 TFLOP/s). A block makes the logits of kExperts x kTokens; its threads split the width.
template <bool Low>
__global__ void __launch_bounds__(kThreads) router_any_kernel(RouterLogitsCudaArgs args) {
    __shared__ float partial[kWarps][kExperts * kTokens];
    const int64_t expert0 = blockIdx.x * static_cast<int64_t>(kExperts);
    const int64_t token0 = blockIdx.y * static_cast<int64_t>(kTokens);
    float sums[kTokens][kExperts] = {};
    for (int64_t column = threadIdx.x * kVector; column < args.width; column += kThreads * kVector) {
        float x[kTokens][kVector];
#pragma unroll
        for (int t = 0; t < kTokens; ++t) {
            load_bf16x8(args.x + min(token0 + t, args.tokens - 1) * args.x_stride + column, x[t]);
        }
#pragma unroll
        for (int e = 0; e < kExperts; ++e) {
            float w[kVector];
            load_weight<Low>(args, min(expert0 + e, args.experts - 1) * args.width + column, w);
#pragma unroll
            for (int t = 0; t < kTokens; ++t) {
#pragma unroll
                for (int i = 0; i < kVector; ++i) {
                    sums[t][e] = fmaf(w[i], x[t][i], sums[t][e]);
                }
            }
        }
    }
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
    const int warp = static_cast<int>(threadIdx.x) / kWarp;
#pragma unroll
    for (int i = 0; i < kExperts * kTokens; ++i) {
        const float sum = warp_reduce(sums[i / kExperts][i % kExperts], Sum{});
        if (lane == 0) {
            partial[warp][i] = sum;
        }
    }
    __syncthreads();
    const int64_t expert = expert0 + threadIdx.x % kExperts;
    const int64_t token = token0 + threadIdx.x / kExperts;
    if (threadIdx.x < kExperts * kTokens && expert < args.experts && token < args.tokens) {
        float sum = partial[0][threadIdx.x];
#pragma unroll
        for (int w = 1; w < kWarps; ++w) {
            sum += partial[w][threadIdx.x];
        }
        args.logits[token * args.logits_stride + expert] = sum;
    }
}

void launch_router_any(cudaStream_t stream, const RouterLogitsCudaArgs& args) {
    check(args.tokens <= 65535 * kTokens, "router_logits: at most 262140 tokens of this width");
    const dim3 grid(static_cast<unsigned>((args.experts + kExperts - 1) / kExperts),
                    static_cast<unsigned>((args.tokens + kTokens - 1) / kTokens));
    const auto kernel = args.low != nullptr ? router_any_kernel<true> : router_any_kernel<false>;
    kernel<<<grid, kThreads, 0, stream>>>(args);
    cuda_check_launch();
}

}  // namespace
}  // namespace cuda

void router_logits_cuda(cudaStream_t stream, const RouterLogitsCudaArgs& args) {
    check(args.width % 8 == 0 && args.x_stride % 8 == 0,
          "router_logits: width and x_stride must be multiples of 8");
    if (args.tokens == 0) {
        return;
    }
    if (cuda::router_few_serves(args)) {
        cuda::launch_router_few(stream, args, {});
    } else if (cuda::router_middle_serves(args)) {
        cuda::launch_router_middle(stream, args, {});
    } else if (cuda::router_pairs_serves(args)) {
        cuda::launch_router_pairs(stream, args, {});
    } else if (cuda::router_many_serves(args)) {
        cuda::launch_router_many(stream, args);
    } else {
        cuda::launch_router_any(stream, args);
    }
}

void router_cuda(cudaStream_t stream, const RouterLogitsCudaArgs& product, RouterTopkCudaArgs choice) {
    choice.logits = product.logits;
    choice.logits_stride = product.logits_stride;
    const auto launch = product.tokens == 0                   ? nullptr
                        : cuda::router_few_serves(product)    ? cuda::launch_router_few
                        : cuda::router_middle_serves(product) ? cuda::launch_router_middle
                        : cuda::router_pairs_serves(product)  ? cuda::launch_router_pairs
                                                              : nullptr;
    if (launch != nullptr) {
        cuda::check_router_choice(choice);
        return launch(stream, product, choice);
    }
    router_logits_cuda(stream, product);
    router_topk_cuda(stream, choice);
}

}  // namespace tessera

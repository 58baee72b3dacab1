#include "base/check.h"
#include "device/cuda/cuda_check.h"
#include "ops/common/cuda/dependent_launch.cuh"
#include "ops/router_topk/cuda/router_kernels.cuh"
#include "ops/router_topk/cuda/router_select.cuh"

namespace tessera {
namespace cuda {
namespace {

constexpr int kThreads = 128;

// Roofline: 4 bytes of logits an expert; a step's tokens take a few microseconds of latency. A warp makes one
// token.
template <int PerLane>
__global__ void __launch_bounds__(kThreads) router_topk_kernel(RouterTopkCudaArgs args) {
    __shared__ SelectRoom rooms[kThreads / kWarp];
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
    const int warp = static_cast<int>(threadIdx.x) / kWarp;
    const int64_t token = blockIdx.x * static_cast<int64_t>(kThreads / kWarp) + warp;
    wait_for_previous_kernel();
    let_next_kernel_start();
    if (token >= args.tokens) {
        return;
    }
    const bool padding = args.positions != nullptr && args.positions[token] < 0;
    float logits[PerLane];
    float bias[PerLane];
#pragma unroll
    for (int j = 0; j < PerLane; ++j) {
        const int expert = lane + kWarp * j;
        const bool exists = expert < args.experts;
        logits[j] = exists ? args.logits[token * args.logits_stride + expert] : 0;
        bias[j] = exists && args.bias != nullptr ? args.bias[expert] : 0;
    }
    if (padding) {
        return select_nothing(args, token, lane);
    }
    ExpertScore score[PerLane];
    score_experts(logits, bias, score);
#pragma unroll
    for (int j = 0; j < PerLane; ++j) {
        if (lane + kWarp * j >= args.experts) {
            score[j] = {};
        }
    }
    select_experts(args, token, score, rooms[warp]);
}

template <int PerLane>
void launch(cudaStream_t stream, const RouterTopkCudaArgs& args) {
    constexpr int kTokens = kThreads / kWarp;
    const dim3 grid(static_cast<unsigned>((args.tokens + kTokens - 1) / kTokens));
    cuda_check(launch_dependent({grid, kThreads, 0, stream}, router_topk_kernel<PerLane>, args));
}

}  // namespace

void check_router_choice(const RouterTopkCudaArgs& args) {
    check(args.experts > 0 && args.experts <= kRouterCudaExpertsMax, "router_topk: 1 to 512 experts");
    check(args.k > 0 && args.k <= args.experts && args.k <= kRouterCudaChosenMax,
          "router_topk: k must be 1 to 32, and at most the number of experts");
}

}  // namespace cuda

void router_topk_cuda(cudaStream_t stream, const RouterTopkCudaArgs& args) {
    cuda::check_router_choice(args);
    if (args.tokens == 0) {
        return;
    }
    if (args.experts <= 32) {
        cuda::launch<1>(stream, args);
    } else if (args.experts <= 64) {
        cuda::launch<2>(stream, args);
    } else if (args.experts <= 192) {
        cuda::launch<6>(stream, args);
    } else {
        cuda::launch<16>(stream, args);
    }
}

}  // namespace tessera

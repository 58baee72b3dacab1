#include "base/check.h"
#include "device/cuda/cuda_check.h"
#include "ops/common/cuda/exp.cuh"
#include "ops/common/cuda/order.cuh"
#include "ops/common/cuda/reduce.cuh"
#include "ops/router_topk/cuda/router_topk_cuda.h"

namespace tessera {
namespace {

using namespace cuda;

constexpr int kThreads = 128;

// Marks the k best of a token's experts: bit j of the result = expert lane + 32 j is chosen.
template <int PerLane>
__device__ __forceinline__ uint32_t choose(const uint64_t (&rank)[PerLane], int64_t k) {
    uint32_t chosen = 0;
    for (int64_t round = 0; round < k; ++round) {
        uint64_t best = 0;
#pragma unroll
        for (int j = 0; j < PerLane; ++j) {
            best = (chosen >> j & 1) == 0 && rank[j] > best ? rank[j] : best;
        }
        const uint64_t winner = warp_reduce(best, Max{});
#pragma unroll
        for (int j = 0; j < PerLane; ++j) {
            chosen |= rank[j] == winner ? 1u << j : 0u;
        }
    }
    return chosen;
}

// Roofline: 4 bytes of logits an expert; a step's tokens take a few microseconds of latency. A warp makes one
// token, lane l the experts l, l + 32, ...
template <int PerLane>
__global__ void __launch_bounds__(kThreads) router_topk_kernel(RouterTopkCudaArgs args) {
    __shared__ int32_t experts[kThreads / kWarp][kWarp];
    __shared__ float scores[kThreads / kWarp][kWarp];
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
    const int warp = static_cast<int>(threadIdx.x) / kWarp;
    const int64_t token = blockIdx.x * static_cast<int64_t>(kThreads / kWarp) + warp;
    if (token >= args.tokens) {
        return;
    }
    if (args.positions != nullptr && args.positions[token] < 0) {
        if (lane < args.k) {
            args.chosen[token * args.k + lane] = -1;
            args.weights[token * args.k + lane] = 0;
        }
        return;
    }
    float score[PerLane];
    uint64_t rank[PerLane];
#pragma unroll
    for (int j = 0; j < PerLane; ++j) {
        const int expert = lane + kWarp * j;
        score[j] = 0;
        rank[j] = 0;  // below every expert
        if (expert < args.experts) {
            score[j] = cuda::sigmoid_f32(args.logits[token * args.logits_stride + expert]);
            const float key = args.bias == nullptr ? score[j] : __fadd_rn(score[j], args.bias[expert]);
            rank[j] = ranked(key, static_cast<uint32_t>(expert));
        }
    }
    const uint32_t chosen = choose<PerLane>(rank, args.k);
    int before = 0;  // chosen experts of lower index
#pragma unroll
    for (int j = 0; j < PerLane; ++j) {
        const bool mine = (chosen >> j & 1) != 0;
        const uint32_t votes = __ballot_sync(kFullWarp, mine);
        if (mine) {
            const int place = before + __popc(votes & ((1u << lane) - 1));
            experts[warp][place] = lane + kWarp * j;
            scores[warp][place] = score[j];
        }
        before += __popc(votes);
    }
    __syncwarp();
    float sum = 0;
    for (int64_t i = 0; i < args.k; ++i) {
        sum = __fadd_rn(sum, scores[warp][i]);
    }
    if (lane < args.k) {
        const float s = scores[warp][lane];
        const float share = args.normalise ? __fdiv_rn(s, __fadd_rn(sum, 1e-20f)) : s;
        args.chosen[token * args.k + lane] = experts[warp][lane];
        args.weights[token * args.k + lane] = __fmul_rn(share, args.scale);
    }
}

template <int PerLane>
void launch(cudaStream_t stream, const RouterTopkCudaArgs& args) {
    constexpr int kTokens = kThreads / kWarp;
    router_topk_kernel<PerLane>
        <<<static_cast<unsigned>((args.tokens + kTokens - 1) / kTokens), kThreads, 0, stream>>>(args);
    cuda_check_launch();
}

}  // namespace

void router_topk_cuda(cudaStream_t stream, const RouterTopkCudaArgs& args) {
    check(args.experts > 0 && args.experts <= kRouterCudaExpertsMax, "router_topk: 1 to 512 experts");
    check(args.k > 0 && args.k <= args.experts && args.k <= kRouterCudaChosenMax,
          "router_topk: k must be 1 to 32, and at most the number of experts");
    if (args.tokens == 0) {
        return;
    }
    if (args.experts <= 32) {
        launch<1>(stream, args);
    } else if (args.experts <= 64) {
        launch<2>(stream, args);
    } else if (args.experts <= 192) {
        launch<6>(stream, args);
    } else {
        launch<16>(stream, args);
    }
}

}  // namespace tessera

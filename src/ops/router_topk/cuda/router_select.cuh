// The choice of one token's experts by one warp.
#pragma once

#include <cstdint>

#include "ops/common/cuda/exp.cuh"
#include "ops/common/cuda/order.cuh"
#include "ops/common/cuda/reduce.cuh"
#include "ops/router_topk/cuda/router_topk_cuda.h"

namespace tessera::cuda {

struct ExpertScore {
    float score = 0;
    uint32_t key = 0;  // 0 = below every expert
};
// bias: 0 without one.
__device__ __forceinline__ ExpertScore expert_score(float logit, float bias) {
    const float score = sigmoid_f32(logit);
    return {score, ordered_bits(__fadd_rn(score, bias))};
}

// Of a lane's keys the largest, at ties the first.
template <int PerLane>
__device__ __forceinline__ int best_of(const uint32_t (&key)[PerLane], uint32_t& best) {
    int place = 0;
    best = key[0];
#pragma unroll
    for (int j = 1; j < PerLane; ++j) {
        place = key[j] > best ? j : place;
        best = max(best, key[j]);
    }
    return place;
}

// Marks the k best of a token's experts: bit j of the result = expert lane + 32 j is chosen.
template <int PerLane>
__device__ __forceinline__ uint32_t choose_experts(uint32_t (&key)[PerLane], int k, int lane) {
    uint32_t chosen = 0;
    for (int round = 0; round < k; ++round) {
        uint32_t best;
        const int place = best_of(key, best);
        const uint32_t top = __reduce_max_sync(kFullWarp, best);
        const uint32_t owners = __ballot_sync(kFullWarp, best == top);
        int winner = __ffs(static_cast<int>(owners)) - 1;
        if ((owners & (owners - 1)) != 0) {  // ties: the lowest expert
            const uint32_t expert = best == top ? static_cast<uint32_t>(lane + kWarp * place) : 0xFFFFu;
            winner = static_cast<int>(__reduce_min_sync(kFullWarp, expert) % kWarp);
        }
#pragma unroll
        for (int j = 0; j < PerLane; ++j) {
            const bool mine = lane == winner && j == place;
            chosen |= mine ? 1u << j : 0u;
            key[j] = mine ? 0 : key[j];
        }
    }
    return chosen;
}

// Room for the choice of one warp.
struct SelectRoom {
    int32_t experts[kWarp];
    float scores[kWarp];
};

__device__ __forceinline__ void select_nothing(const RouterTopkCudaArgs& args, int64_t token, int lane) {
    if (lane < args.k) {
        args.chosen[token * args.k + lane] = -1;
        args.weights[token * args.k + lane] = 0;
    }
}

// Lane l has the experts l, l + 32, ... All lanes take part.
template <int PerLane>
__device__ __forceinline__ void select_experts(const RouterTopkCudaArgs& args, int64_t token,
                                               const ExpertScore (&score)[PerLane], SelectRoom& room) {
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
    const int k = static_cast<int>(args.k);
    uint32_t key[PerLane];
#pragma unroll
    for (int j = 0; j < PerLane; ++j) {
        key[j] = score[j].key;
    }
    const uint32_t chosen = choose_experts(key, k, lane);
    int before = 0;  // chosen experts of lower index
#pragma unroll
    for (int j = 0; j < PerLane; ++j) {
        const bool mine = (chosen >> j & 1) != 0;
        const uint32_t votes = __ballot_sync(kFullWarp, mine);
        if (mine) {
            const int place = before + __popc(votes & ((1u << lane) - 1));
            room.experts[place] = lane + kWarp * j;
            room.scores[place] = score[j].score;
        }
        before += __popc(votes);
    }
    __syncwarp();
    const float mine = lane < k ? room.scores[lane] : 0;
    float sum = 0;
    for (int first = 0; first < k; first += 8) {
#pragma unroll
        for (int i = 0; i < 8; ++i) {  // beyond k zeros, which change nothing
            sum = __fadd_rn(sum, __shfl_sync(kFullWarp, mine, first + i));
        }
    }
    if (lane < k) {
        const float share = args.normalise ? __fdiv_rn(mine, __fadd_rn(sum, 1e-20f)) : mine;
        args.chosen[token * k + lane] = room.experts[lane];
        args.weights[token * k + lane] = __fmul_rn(share, args.scale);
    }
    __syncwarp();
}

}  // namespace tessera::cuda

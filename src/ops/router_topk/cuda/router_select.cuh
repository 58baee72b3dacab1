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
// Several side by side. bias: 0 without one.
template <int Count>
__device__ __forceinline__ void score_experts(const float (&logits)[Count], const float (&bias)[Count],
                                              ExpertScore (&scores)[Count]) {
    float sigmoids[Count];
    sigmoid_f32(logits, sigmoids);
#pragma unroll
    for (int i = 0; i < Count; ++i) {
        scores[i] = {sigmoids[i], ordered_bits(__fadd_rn(sigmoids[i], bias[i]))};
    }
}

// A lane's keys in descending order, each with a bit for its place before; equal keys stay in order.
template <int PerLane>
struct LaneKeys {
    uint32_t key[PerLane];
    uint32_t bit[PerLane];

    __device__ __forceinline__ void sort() {
#pragma unroll
        for (int round = 0; round < PerLane; ++round) {
#pragma unroll
            for (int i = round % 2; i + 1 < PerLane; i += 2) {
                const bool swap = key[i] < key[i + 1];
                const uint32_t k = key[i];
                const uint32_t b = bit[i];
                key[i] = swap ? key[i + 1] : k;
                bit[i] = swap ? bit[i + 1] : b;
                key[i + 1] = swap ? k : key[i + 1];
                bit[i + 1] = swap ? b : bit[i + 1];
            }
        }
    }
    __device__ __forceinline__ void drop_first(bool drop) {
#pragma unroll
        for (int i = 0; i + 1 < PerLane; ++i) {
            key[i] = drop ? key[i + 1] : key[i];
            bit[i] = drop ? bit[i + 1] : bit[i];
        }
        key[PerLane - 1] = drop ? 0 : key[PerLane - 1];
    }
};

// Marks the k best of a token's experts: bit j of the result = expert lane + 32 j is chosen.
template <int PerLane>
__device__ __forceinline__ uint32_t choose_experts(LaneKeys<PerLane>& keys, int k, int lane) {
    uint32_t chosen = 0;
    keys.sort();
    for (int round = 0; round < k; ++round) {
        const uint32_t top = __reduce_max_sync(kFullWarp, keys.key[0]);
        bool mine = keys.key[0] == top;
        const uint32_t owners = __ballot_sync(kFullWarp, mine);
        if ((owners & (owners - 1)) != 0) {  // ties: the lowest expert
            const uint32_t expert = mine ? static_cast<uint32_t>(lane) + kWarp * keys.bit[0] : ~0u;
            mine = __reduce_min_sync(kFullWarp, expert) == expert && mine;
        }
        chosen |= mine ? keys.bit[0] : 0u;
        keys.drop_first(mine);
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
    LaneKeys<PerLane> keys;
#pragma unroll
    for (int j = 0; j < PerLane; ++j) {
        keys.key[j] = score[j].key;
        keys.bit[j] = 1u << j;
    }
    const uint32_t chosen = choose_experts(keys, k, lane);
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

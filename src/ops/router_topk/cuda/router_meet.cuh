// Sums that blocks send each other through the workspace, 16 bytes that are their own flags, and the choice
// from logits in shared memory.
#pragma once

#include <cstdint>

#include "ops/common/cuda/dependent_launch.cuh"
#include "ops/common/cuda/relaxed.cuh"
#include "ops/router_topk/cuda/router_select.cuh"

namespace tessera::cuda {

inline constexpr int kMeetExperts = 192;  // at most
inline constexpr int kMeetPerLane = kMeetExperts / kWarp;
inline constexpr uint32_t kAbsent =
    0xFFFFFFFFu;  // a sum that is not there yet; sums that are NaN have other bits

__device__ __forceinline__ uint32_t present(float sum) {
    const uint32_t bits = __float_as_uint(sum);
    return bits == kAbsent ? 0x7FFFFFFFu : bits;
}
__device__ __forceinline__ bool is_absent(uint4 v) {
    return v.x == kAbsent || v.y == kAbsent || v.z == kAbsent || v.w == kAbsent;
}

__device__ __forceinline__ void make_absent(uint32_t* at) {
    *reinterpret_cast<uint4*>(at) = make_uint4(kAbsent, kAbsent, kAbsent, kAbsent);
}
__device__ __forceinline__ float4 as_floats(uint4 v) {
    return {__uint_as_float(v.x), __uint_as_float(v.y), __uint_as_float(v.z), __uint_as_float(v.w)};
}
__device__ __forceinline__ float4 operator+(float4 a, float4 b) {
    return {a.x + b.x, a.y + b.y, a.z + b.z, a.w + b.w};
}

// Four logits side by side to their places in a row. quads: the row lies at a multiple of 16 bytes.
__device__ __forceinline__ void store_logits(float* row, int expert, int experts, bool quads, float4 v) {
    if (quads && expert + 4 <= experts) {
        *reinterpret_cast<float4*>(row + expert) = v;
        return;
    }
    const float values[4] = {v.x, v.y, v.z, v.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        if (expert + i < experts) {
            row[expert + i] = values[i];
        }
    }
}

// What a warp's choices need beside the logits, loaded before they are there: the bias does not wait for the
// kernel before.
template <int RowsAWarp, int Warps>
struct Beside {
    float bias[kMeetPerLane];
    bool padding[RowsAWarp];

    // Of the warp's rows warp, warp + Warps, ...; token_of(row): a row's token.
    template <typename TokenOf>
    __device__ __forceinline__ Beside(const RouterTopkCudaArgs& choice, const TokenOf& token_of) {
        const bool chooses = choice.chosen != nullptr;
#pragma unroll
        for (int j = 0; j < kMeetPerLane; ++j) {
            const int expert = static_cast<int>(threadIdx.x) % kWarp + kWarp * j;
            bias[j] = chooses && choice.bias != nullptr && expert < choice.experts ? choice.bias[expert] : 0;
        }
        wait_for_previous_kernel();
#pragma unroll
        for (int r = 0; r < RowsAWarp; ++r) {
            const int token = token_of(static_cast<int>(threadIdx.x) / kWarp + r * Warps);
            padding[r] = chooses && choice.positions != nullptr && token < choice.tokens &&
                         choice.positions[token] < 0;
        }
    }

    // By the warp: the choice of its token r, whose logits are `row`.
    __device__ __forceinline__ void choose(const RouterTopkCudaArgs& choice, int token, int r,
                                           const float* row, SelectRoom& room) const {
        const int lane = static_cast<int>(threadIdx.x) % kWarp;
        if (padding[r]) {
            return select_nothing(choice, token, lane);
        }
        float logits[kMeetPerLane];
#pragma unroll
        for (int j = 0; j < kMeetPerLane; ++j) {
            logits[j] = row[lane + kWarp * j];
        }
        ExpertScore scores[kMeetPerLane];
        score_experts(logits, bias, scores);
#pragma unroll
        for (int j = 0; j < kMeetPerLane; ++j) {
            if (lane + kWarp * j >= choice.experts) {
                scores[j] = {};
            }
        }
        select_experts(choice, token, scores, room);
    }
};

}  // namespace tessera::cuda

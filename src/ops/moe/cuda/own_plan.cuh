// The plan of a batch with few pairs, by each block of the experts' kernel for itself: all find the same.
//
// It saves a launch before the first weights: a block knows its first tile 2 to 5 us after the choices are
// there.
#pragma once

#include <cstdint>

#include "ops/common/cuda/async_copy.cuh"
#include "ops/common/cuda/dependent_launch.cuh"
#include "ops/moe/cuda/experts.cuh"

namespace tessera::cuda {

inline constexpr int kOwnThreads = 128;
inline constexpr int kOwnWarps = kOwnThreads / 32;
// A warp counts some stretches of the pairs side by side, to wait less.
inline constexpr int kOwnSide = 4;
inline constexpr int kOwnStretches = kOwnWarps * kOwnSide;
inline constexpr int kOwnRounds = kOwnPairs / (32 * kOwnStretches);
inline constexpr int kOwnNobody = 0xFFFF;  // a pair without an expert

// What the plan needs of a block's shared memory while it is made: the first stage that is not asked for
// early.
struct OwnScratch {
    // Pairs of each stretch by expert, two experts a word; later the row of the first of them.
    uint32_t counts[kOwnStretches][kOwnExperts / 2];
    uint16_t chosen[kOwnPairs];
    uint16_t place[kOwnPairs];  // of a pair among its expert's of the stretch
};

// By kOwnThreads, which are whole warps. Rows of an expert are in the order of the pairs.
template <typename Shape>
__device__ __forceinline__ void own_plan(const ExpertsArgs& args, const ExpertsMemory<Shape>& memory) {
    constexpr int kBarrier = 5;
    static_assert(kOwnExperts / 2 == kOwnThreads);
    ExpertsOwnPlan<Shape::kTileMax>& plan = *memory.own_plan();
    static_assert(Shape::kStages > kEarlySteps && sizeof(OwnScratch) <= Shape::kStageBytes);
    OwnScratch& scratch = *reinterpret_cast<OwnScratch*>(memory.base + kEarlySteps * Shape::kStageBytes);
    const int thread = static_cast<int>(threadIdx.x % kOwnThreads);
    const int lane = thread % 32;
    const int warp = thread / 32;
    const int pairs = args.tokens * args.k;
    // Of each stretch; pair 32 n + lane of stretch s is s * 32 * rounds + 32 * n + lane.
    const int rounds = max((pairs + 32 * kOwnStretches - 1) / (32 * kOwnStretches), 1);
    const int first = warp * kOwnSide * 32 * rounds + lane;
    const int all = kOwnSide * rounds;  // of this thread
    int32_t ids[kOwnSide * kOwnRounds];
#pragma unroll
    for (int n = 0; n < kOwnSide * kOwnRounds; ++n) {
        const int pair = first + 32 * n;
        ids[n] = n < all && pair < pairs ? args.chosen[pair] : -1;
    }
#pragma unroll
    for (int i = 0; i < kOwnStretches; ++i) {
        scratch.counts[i][thread] = 0;
    }
#pragma unroll
    for (int n = 0; n < kOwnSide * kOwnRounds; ++n) {
        if (n < all) {
            scratch.chosen[first + 32 * n] =
                static_cast<uint16_t>(ids[n] >= 0 && ids[n] < args.experts ? ids[n] : kOwnNobody);
        }
    }
    group_barrier(kBarrier, kOwnThreads);
#pragma unroll 1
    for (int n = 0; n < rounds; ++n) {
        int expert[kOwnSide];
        uint32_t same[kOwnSide];
        int count[kOwnSide];
#pragma unroll
        for (int i = 0; i < kOwnSide; ++i) {
            expert[i] = scratch.chosen[first + 32 * (i * rounds + n)];
            same[i] = __match_any_sync(0xFFFFFFFFu, expert[i]);
        }
#pragma unroll
        for (int i = 0; i < kOwnSide; ++i) {
            const auto* counts = reinterpret_cast<const uint16_t*>(scratch.counts[warp * kOwnSide + i]);
            count[i] = expert[i] != kOwnNobody ? counts[expert[i]] : 0;
        }
        __syncwarp();
#pragma unroll
        for (int i = 0; i < kOwnSide; ++i) {
            auto* counts = reinterpret_cast<uint16_t*>(scratch.counts[warp * kOwnSide + i]);
            const int before = __popc(same[i] & ((1u << lane) - 1));
            scratch.place[first + 32 * (i * rounds + n)] = static_cast<uint16_t>(count[i] + before);
            if (expert[i] != kOwnNobody && before == 0) {
                counts[expert[i]] = static_cast<uint16_t>(count[i] + __popc(same[i]));
            }
        }
        __syncwarp();
    }
    group_barrier(kBarrier, kOwnThreads);
    // Two experts a thread. Sums over the stretches, then over the experts before: pairs and items.
    uint32_t both = 0;
#pragma unroll
    for (int i = 0; i < kOwnStretches; ++i) {
        both += scratch.counts[i][thread];
    }
    int count[2] = {static_cast<int>(both & 0xFFFF), static_cast<int>(both >> 16)};
    ExpertsCut cut[2];
    uint32_t sum = 0;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        cut[i] = experts_cut(count[i], Shape::kTileMax);
        sum += static_cast<uint32_t>(count[i] | cut[i].items << 16);
    }
    static_assert(kOwnPairs < 1 << 16 && ExpertsOwnPlan<Shape::kTileMax>::kItems < 1 << 16);
    uint32_t ends = sum;
#pragma unroll 1
    for (int offset = 1; offset < 32; offset *= 2) {
        const uint32_t other = __shfl_up_sync(0xFFFFFFFFu, ends, offset);
        ends += lane >= offset ? other : 0;
    }
    if (lane == 31) {
        plan.warps[warp] = ends;
    }
    group_barrier(kBarrier, kOwnThreads);
#pragma unroll
    for (int i = 0; i < kOwnWarps - 1; ++i) {
        ends += i < warp ? plan.warps[i] : 0;
    }
    if (thread == kOwnThreads - 1) {
        plan.routed_items = static_cast<int>(ends >> 16);
    }
    const uint32_t start = ends - sum;
    int row = static_cast<int>(start & 0xFFFF);
    int place = static_cast<int>(start >> 16);
    uint32_t rows_begin = static_cast<uint32_t>(row | (row + count[0]) << 16);
#pragma unroll
    for (int i = 0; i < kOwnStretches; ++i) {
        const uint32_t here = scratch.counts[i][thread];
        scratch.counts[i][thread] = rows_begin;
        rows_begin += here;
    }
#pragma unroll 1
    for (int i = 0; i < 2; ++i) {
        const int expert = 2 * thread + i;
        const int here = i == 0 ? count[0] : count[1];
        const ExpertsCut pieces = i == 0 ? cut[0] : cut[1];
        for (int n = 0; n < pieces.items; ++n) {
            plan.items[place++] = {.expert = static_cast<uint16_t>(expert),
                                   .row = static_cast<uint16_t>(row + n * pieces.rows),
                                   .rows = static_cast<uint16_t>(min(pieces.rows, here - n * pieces.rows))};
        }
        row += here;
    }
    group_barrier(kBarrier, kOwnThreads);
    const float tokens_per_pair = 1.0f / static_cast<float>(args.k);
#pragma unroll 1
    for (int n = 0; n < rounds; ++n) {
#pragma unroll
        for (int i = 0; i < kOwnSide; ++i) {
            const auto* counts = reinterpret_cast<const uint16_t*>(scratch.counts[warp * kOwnSide + i]);
            const int pair = first + 32 * (i * rounds + n);
            const int expert = scratch.chosen[pair];
            int slot = -1;
            if (expert != kOwnNobody) {
                slot = counts[expert] + scratch.place[pair];
                // Exact for so few pairs, and faster than a division.
                plan.tokens[slot] =
                    static_cast<uint16_t>((static_cast<float>(pair) + 0.5f) * tokens_per_pair);
            }
            if (blockIdx.x == 0 && pair < pairs) {
                args.slots[pair] = slot;
            }
        }
    }
    fence_proxy_async();  // the copy engine writes there next
    group_barrier(kBarrier, kOwnThreads);
}

// What the next call finds. By a warp of each block that knows that it has no further tile, and that all rows
// of act that it reads are there: the last one sets the counters back.
__device__ __forceinline__ void own_plan_leave(const ExpertsArgs& args) {
    const int lane = static_cast<int>(threadIdx.x % 32);
    uint32_t before = 0;
    __syncwarp();
    if (lane == 0) {
        __threadfence();
        before = atomicInc(args.left, gridDim.x - 1);
    }
    before = __shfl_sync(0xFFFFFFFFu, before, 0);
    if ((before + 1) % gridDim.x != gridDim.x - 1) {
        return;
    }
    __threadfence();
    if (lane == 0) {
        *args.next_tile = kOwnCounter;
    }
    for (int i = lane; i < args.ready_count; i += 32) {
        args.ready[i] = kOwnCounter;
    }
}

}  // namespace tessera::cuda

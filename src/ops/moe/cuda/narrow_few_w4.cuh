// Gate and up of narrow int4 experts for a few tokens: units spread over all multiprocessors.
//
// Roofline: memory, 0.516 bytes a weight: 0.81 MB an expert of 192 at hidden 4096.
//
// Schedule: a block takes units of 64 rows of weights (32 outputs) of the chosen experts in turn; its four
// consumers have a quarter of the inputs each, and a ring of two groups at a place each. The N side of wgmma
// is all tokens, which stay in shared memory. Three further warps add the quarters of a unit, apply SwiGLU
// and store, while the consumers go on. Act is stored in bfloat16: narrow_few_down_w4.cuh quantises it.
#pragma once

#include <cstdint>

#include "ops/common/cuda/ask_ahead.cuh"
#include "ops/common/cuda/async_copy.cuh"
#include "ops/common/cuda/convert.cuh"
#include "ops/common/cuda/dependent_launch.cuh"
#include "ops/common/cuda/relaxed.cuh"
#include "ops/moe/cuda/grouped_products.cuh"
#include "ops/moe/cuda/narrow_down_weights.cuh"
#include "ops/moe/cuda/narrow_few_w4.h"
#include "ops/moe/cuda/swiglu.cuh"

namespace tessera::cuda {

inline constexpr int kNarrowFewConsumers = 4;
inline constexpr int kNarrowFewThreads = 128 * (kNarrowFewConsumers + 1);
inline constexpr int kNarrowFewPublishers = 3;             // warps
inline constexpr int kNarrowFewUnits = kNarrowWidth / 32;  // of an expert

template <int N>
struct NarrowFewShape {
    static constexpr int kTokens = N;
    static constexpr int kSlots = N <= 8 ? 5 : 3;  // of a consumer's weights
    static constexpr int kSlotBytes = 2 * kNarrowGroupBytes;
    static constexpr int kPartStride = 64 + 4;  // floats of a token's sums: writers share no banks
    static constexpr int kPartBytes = N * kPartStride * 4;  // of a consumer
    static constexpr int kX = 0;
    static constexpr int kWeights = N * kNarrowFewHidden;
    static constexpr int kParts = kWeights + kNarrowFewConsumers * kSlots * kSlotBytes;  // two of them
    static constexpr int kBarriers = kParts + 2 * kNarrowFewConsumers * kPartBytes;
    static constexpr int kBarrierCount = 2 * kNarrowFewConsumers * kSlots + 4;
    static constexpr int kExperts = kBarriers + kBarrierCount * 8;    // uint16_t [pairs]: of the entries
    static constexpr int kPlaces = kExperts + N * kNarrowFewK * 2;    // uint8_t [pairs][N]: which of k, + 1
    static constexpr int kEntries = kPlaces + N * kNarrowFewK * N;    // uint16_t [experts]: their entries
    static constexpr int kCounts = kEntries + kNarrowFewExperts * 2;  // uint32_t [warps of experts]
    static constexpr int kBytes = kCounts + kNarrowFewExperts / 32 * 4;
    static_assert(kBytes <= 232448 && kParts % 16 == 0 && kBarriers % 8 == 0);
};

template <typename Shape>
struct NarrowFewMemory {
    uint8_t* base = nullptr;
    uint32_t address = 0;

    __device__ __forceinline__ ExpertsRing<Shape::kSlots> weights(int consumer) const {
        return {.barriers = address + Shape::kBarriers + 16 * consumer * Shape::kSlots};
    }
    __device__ __forceinline__ uint32_t slot(int consumer, int slot) const {
        return address + Shape::kWeights + (consumer * Shape::kSlots + slot) * Shape::kSlotBytes;
    }
    __device__ __forceinline__ ExpertsRing<2> parts() const {
        return {.barriers = address + Shape::kBarriers + 16 * kNarrowFewConsumers * Shape::kSlots};
    }
    __device__ __forceinline__ float* part(int buffer, int consumer) const {
        return reinterpret_cast<float*>(base + Shape::kParts +
                                        (buffer * kNarrowFewConsumers + consumer) * Shape::kPartBytes);
    }
    __device__ __forceinline__ uint16_t* experts() const {
        return reinterpret_cast<uint16_t*>(base + Shape::kExperts);
    }
    __device__ __forceinline__ uint8_t* places() const { return base + Shape::kPlaces; }
    __device__ __forceinline__ uint16_t* entries() const {
        return reinterpret_cast<uint16_t*>(base + Shape::kEntries);
    }
    __device__ __forceinline__ uint32_t* counts() const {
        return reinterpret_cast<uint32_t*>(base + Shape::kCounts);
    }
};

// By all threads: the chosen experts, each once, and the tokens of each. Their number.
template <typename Shape>
__device__ __forceinline__ int narrow_few_entries(const NarrowFewArgs& args,
                                                  const NarrowFewMemory<Shape>& memory) {
    const int thread = static_cast<int>(threadIdx.x);
    const int lane = thread % 32;
    static_assert(kNarrowFewExperts <= kNarrowFewThreads &&
                  Shape::kTokens * kNarrowFewK <= kNarrowFewThreads);
    const int id = thread < args.tokens * args.k ? args.chosen[thread] : -1;
    const bool valid = id >= 0 && id < args.experts;
    if (thread < kNarrowFewExperts) {
        memory.entries()[thread] = 0;
    }
    for (int i = thread; i < Shape::kTokens * kNarrowFewK * Shape::kTokens / 4; i += kNarrowFewThreads) {
        reinterpret_cast<uint32_t*>(memory.places())[i] = 0;
    }
    __syncthreads();
    if (valid) {
        memory.entries()[id] = 1;
    }
    __syncthreads();
    const bool chosen = thread < kNarrowFewExperts && memory.entries()[thread] != 0;
    const uint32_t all = __ballot_sync(0xFFFFFFFFu, chosen);
    if (lane == 0 && thread < kNarrowFewExperts) {
        memory.counts()[thread / 32] = __popc(all);
    }
    __syncthreads();
    int before = __popc(all & ((1u << lane) - 1));
    int total = 0;
#pragma unroll
    for (int i = 0; i < kNarrowFewExperts / 32; ++i) {
        const int count = static_cast<int>(memory.counts()[i]);
        before += i < thread / 32 ? count : 0;
        total += count;
    }
    if (chosen) {
        memory.entries()[thread] = static_cast<uint16_t>(before);
        memory.experts()[before] = static_cast<uint16_t>(thread);
    }
    __syncthreads();
    if (valid) {
        memory.places()[memory.entries()[id] * Shape::kTokens + thread / args.k] =
            static_cast<uint8_t>(thread % args.k + 1);
    }
    __syncthreads();
    return total;
}

// Groups of a consumer's part of the inputs.
struct NarrowFewInputs {
    int first = 0;
    int count = 0;
    __device__ __forceinline__ NarrowFewInputs(int hidden, int consumer) {
        const int groups = hidden / static_cast<int>(kGroupedInputs);
        first = groups * consumer / kNarrowFewConsumers;
        count = groups * (consumer + 1) / kNarrowFewConsumers - first;
    }
};

// One thread: the units' weights.
template <typename Shape>
__device__ __forceinline__ void narrow_few_bring(const NarrowFewArgs& args,
                                                 const NarrowFewMemory<Shape>& memory, int units) {
    ExpertsRing<Shape::kSlots> rings[kNarrowFewConsumers];
#pragma unroll
    for (int c = 0; c < kNarrowFewConsumers; ++c) {
        rings[c] = memory.weights(c);
    }
    const int64_t unit_bytes = w4_unit_bytes(args.hidden);
    const int most =
        (args.hidden / static_cast<int>(kGroupedInputs) + kNarrowFewConsumers - 1) / kNarrowFewConsumers;
    for (int unit = static_cast<int>(blockIdx.x); unit < units; unit += static_cast<int>(gridDim.x)) {
        const int64_t expert = memory.experts()[unit / kNarrowFewUnits];
        const uint8_t* from = args.gate_up + (expert * kNarrowFewUnits + unit % kNarrowFewUnits) * unit_bytes;
        for (int group = 0; group < most; group += 2) {
#pragma unroll
            for (int c = 0; c < kNarrowFewConsumers; ++c) {
                const NarrowFewInputs inputs(args.hidden, c);
                if (group < inputs.count) {
                    const uint32_t bytes = min(2, inputs.count - group) * kNarrowGroupBytes;
                    barrier_wait(rings[c].empty(), rings[c].parity ^ 1);
                    barrier_arrive_expect(rings[c].full(), bytes);
                    copy_bulk_once(memory.slot(c, rings[c].stage),
                                   from + (inputs.first + group) * kNarrowGroupBytes, bytes, rings[c].full());
                    rings[c].advance();
                }
            }
        }
    }
    // Down's follow, into the level-2 cache, the first experts' first: memory has no pause.
    constexpr int kUnits = 4;  // at once
    const int down_units = args.hidden / static_cast<int>(kGroupedUnitRows);
    const int pieces = (down_units + kUnits - 1) / kUnits;
    for (int i = static_cast<int>(blockIdx.x); i < units / kNarrowFewUnits * pieces;
         i += static_cast<int>(gridDim.x)) {
        const int first = i % pieces * kUnits;
        const int64_t unit = static_cast<int64_t>(memory.experts()[i / pieces]) * down_units + first;
        ask_ahead(args.down + unit * kNarrowDownBytes, min(kUnits, down_units - first) * kNarrowDownBytes);
    }
}

// By the consumers' threads: x, in the 128-byte swizzle, a group after the other.
template <typename Shape>
__device__ __forceinline__ void narrow_few_rows(const NarrowFewArgs& args,
                                                const NarrowFewMemory<Shape>& memory, int tokens) {
    const int pieces = args.hidden / 16;
    for (int i = static_cast<int>(threadIdx.x); i < tokens * pieces; i += 128 * kNarrowFewConsumers) {
        const int row = i / pieces;
        const int piece = i % pieces;
        copy_async_16(
            memory.address + piece / 8 * (Shape::kTokens * kSwizzleRowBytes) + swizzle_128(row, piece % 8),
            args.x + row * args.hidden + piece * 16);
    }
    copy_async_commit();
    copy_async_wait<0>();
    fence_proxy_async();
    group_barrier(1, 128 * kNarrowFewConsumers);
}

template <typename Shape>
__device__ __forceinline__ void narrow_few_multiply(const NarrowFewArgs& args,
                                                    const NarrowFewMemory<Shape>& memory, int consumer,
                                                    int units) {
    constexpr int N = Shape::kTokens;
    const int thread = static_cast<int>(threadIdx.x % 128);
    const int lane = thread % 32;
    const NarrowFewInputs inputs(args.hidden, consumer);
    ExpertsRing<Shape::kSlots> weights = memory.weights(consumer);
    ExpertsRing<2> parts = memory.parts();
    const auto load = [&](int group) {
        if (group % 2 == 0) {
            barrier_wait(weights.full(), weights.parity);
        }
        const W4Raw raw = w4_load_unit(memory.slot(consumer, weights.stage) + group % 2 * kNarrowGroupBytes);
        if (group % 2 != 0 || group + 1 == inputs.count) {
            grouped_release(weights);
        }
        return raw;
    };
    for (int unit = static_cast<int>(blockIdx.x); unit < units; unit += static_cast<int>(gridDim.x)) {
        float sums[N / 2] = {};
        if (inputs.count > 0) {
            W4Weights now = w4_convert(load(0));
#pragma unroll 1
            for (int group = 0; group < inputs.count; ++group) {
                float part[N / 2];
                grouped_issue<N>(
                    part, now,
                    mma_descriptor(memory.address + (inputs.first + group) * N * kSwizzleRowBytes));
                W4Weights next{};
                if (group + 1 < inputs.count) {
                    next = w4_convert(load(group + 1));
                }
                mma_wait<0>();
                grouped_hold(now);
                grouped_promote<N>(sums, part, now);
                now = next;
            }
        }
        barrier_wait(parts.empty(), parts.parity ^ 1);
        float* to = memory.part(parts.stage, consumer) + thread / 32 * 16 + lane / 4;
#pragma unroll
        for (int j = 0; j < N / 8; ++j) {
            float* column = to + (8 * j + lane % 4 * 2) * Shape::kPartStride;
            column[0] = sums[4 * j];
            column[Shape::kPartStride] = sums[4 * j + 1];
            column[8] = sums[4 * j + 2];
            column[Shape::kPartStride + 8] = sums[4 * j + 3];
        }
        __syncwarp();
        barrier_arrive_for_all(parts.full(), lane == 0);
        parts.advance();
    }
}

// Some warps: a token each in turn, a lane for each output.
template <typename Shape>
__device__ __forceinline__ void narrow_few_publish(const NarrowFewArgs& args,
                                                   const NarrowFewMemory<Shape>& memory, int warp, int units,
                                                   int tokens) {
    const int lane = static_cast<int>(threadIdx.x % 32);
    const auto gate_row = static_cast<int>(grouped_gate_row(lane));
    const float scales = lane < tokens ? args.x_scale[lane] : 0.0f;
    ExpertsRing<2> parts = memory.parts();
    for (int unit = static_cast<int>(blockIdx.x); unit < units; unit += static_cast<int>(gridDim.x)) {
        const uint8_t* places = memory.places() + unit / kNarrowFewUnits * Shape::kTokens;
        barrier_wait(parts.full(), parts.parity);
        for (int token = warp; token < tokens; token += kNarrowFewPublishers) {
            const int place = places[token];
            if (place == 0) {
                continue;
            }
            float gate = 0;
            float up = 0;
#pragma unroll
            for (int c = 0; c < kNarrowFewConsumers; ++c) {
                const float* from = memory.part(parts.stage, c) + token * Shape::kPartStride + gate_row;
                gate += from[0];
                up += from[8];
            }
            const float scale = __shfl_sync(0xFFFFFFFFu, scales, token) * kW4Unit;
            const float value = swiglu(gate * scale, up * scale);
            const float next = __shfl_down_sync(0xFFFFFFFFu, value, 1);
            if (lane % 2 == 0) {
                const int pair = token * args.k + place - 1;
                *reinterpret_cast<uint32_t*>(args.act + pair * kNarrowWidth + unit % kNarrowFewUnits * 32 +
                                             lane) = pack_bf16(value, next);
            }
        }
        __syncwarp();
        barrier_arrive_for_all(parts.empty(), lane == 0);
        parts.advance();
    }
}

template <int N>
__global__ void __launch_bounds__(kNarrowFewThreads, 1)
    narrow_few_kernel(const __grid_constant__ NarrowFewArgs args) {
    using Shape = NarrowFewShape<N>;
    extern __shared__ __align__(1024) uint8_t shared_raw[];
    const NarrowFewMemory<Shape> memory{.base = shared_raw, .address = shared_address(shared_raw)};
    const auto thread = static_cast<int>(threadIdx.x);
    const int warpgroup = thread / 128;
    if (thread < Shape::kBarrierCount) {
        const int weights = 2 * kNarrowFewConsumers * Shape::kSlots;
        uint32_t arrivals = 1;
        if (thread >= weights) {
            arrivals =
                (thread - weights < 2 ? 4 * kNarrowFewConsumers : kNarrowFewPublishers) * kWarpArrivals;
        } else if (thread / Shape::kSlots % 2 != 0) {
            arrivals = 4 * kWarpArrivals;
        }
        barrier_init(memory.address + Shape::kBarriers + 8 * thread, arrivals);
    }
    barrier_init_fence();
    let_next_kernel_start();
    if (!args.early) {
        wait_for_previous_kernel();
    }
    const int tokens = args.tokens;
    const int units = narrow_few_entries(args, memory) * kNarrowFewUnits;
    if (warpgroup == kNarrowFewConsumers) {
        if (thread % 128 == 0) {
            narrow_few_bring(args, memory, units);
        }
        __syncwarp();
        const int warp = thread / 32 % 4 - 1;
        if (warp >= 0) {
            wait_for_previous_kernel();
            narrow_few_publish(args, memory, warp, units, tokens);
        }
    } else {
        wait_for_previous_kernel();
        narrow_few_rows(args, memory, tokens);
        narrow_few_multiply(args, memory, warpgroup, units);
    }
}

}  // namespace tessera::cuda

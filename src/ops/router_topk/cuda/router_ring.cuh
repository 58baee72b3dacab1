// A block's products of a tile of tokens with a tile of experts over a piece of the width: two threads fill a
// ring of stages by the copy engine, the first warpgroups multiply.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "ops/common/cuda/async_copy.cuh"
#include "ops/common/cuda/dependent_launch.cuh"
#include "ops/common/cuda/reduce.cuh"
#include "ops/common/cuda/tensor_map.h"
#include "ops/common/cuda/wgmma_shapes.cuh"
#include "ops/router_topk/cuda/router_topk_cuda.h"

namespace tessera::cuda {

inline constexpr int kRingParts = 8;     // of the width, each with sums of its own
inline constexpr int kRingColumns = 64;  // of a stage: 128 bytes of each row
inline constexpr int kRingRowBytes = 128;
inline constexpr int kRingBarrierBytes = 1024;

// A block multiplies 64 TokenGroups tokens with BlockExperts experts over one of `Splits` pieces of the
// width, a warpgroup 64 tokens with an equal share of the experts. RoomBytes of shared memory lie after the
// ring. XPace: clocks between the first ring of x's stages; else all blocks ask memory for all of it at once,
// and some wait long for their first.
template <int TokenGroups, int ExpertGroups, int BlockExperts, int Splits, bool Low, int RoomBytes,
          int XPace = 0>
struct RingTile {
    static constexpr bool kLow = Low;
    static constexpr int kSplits = Splits;
    static constexpr int kTokens = 64 * TokenGroups;
    static constexpr int kBlockExperts = BlockExperts;
    static constexpr int kTokenGroups = TokenGroups;
    static constexpr int kGroups = TokenGroups * ExpertGroups;         // warpgroups that multiply
    static constexpr int kGroupExperts = BlockExperts / ExpertGroups;  // of each
    static constexpr int kChunks = kRingParts / Splits;
    static constexpr int kXPace = XPace;
    static constexpr int kXBytes = kTokens * kRingRowBytes;
    static constexpr int kWeightBytes = BlockExperts * kRingRowBytes;
    static constexpr int kStageBytes = kXBytes + (Low ? 2 : 1) * kWeightBytes;
    static constexpr int kStages =
        std::min(8, (224 * 1024 - kRingBarrierBytes - 1024 - RoomBytes) / kStageBytes);
    static constexpr int kSharedBytes = kRingBarrierBytes + 1024 + kStages * kStageBytes + RoomBytes;
    static_assert(8 * (2 * kStages + 8) <= kRingBarrierBytes);
};

struct RingArgs {
    CUtensorMap x, high, low;
    int stages = 0;             // of the whole width
    RouterTopkCudaArgs choice;  // without a place for it, the logits are stored
    float* logits = nullptr;
    int64_t logits_stride = 0;
    int tokens = 0;
    int experts = 0;
};
template <typename T>
RingArgs ring_args(const RouterLogitsCudaArgs& product, const RouterTopkCudaArgs& choice) {
    const auto weight_map = [&](const __nv_bfloat16* weights) {
        return make_tensor_map(weights, DType::kBFloat16, product.experts, product.width, T::kBlockExperts);
    };
    return {.x = make_tensor_map(product.x, {.dtype = DType::kBFloat16,
                                             .rank = 2,
                                             .sizes = {product.width, product.tokens},
                                             .strides = {product.x_stride * 2},
                                             .box = {T::kTokens}}),
            .high = weight_map(product.high),
            .low = weight_map(T::kLow ? product.low : product.high),
            .stages = static_cast<int>(product.width / kRingColumns),
            .choice = choice,
            .logits = product.logits,
            .logits_stride = product.logits_stride,
            .tokens = static_cast<int>(product.tokens),
            .experts = static_cast<int>(product.experts)};
}

// Where a block works, and its ring of stages.
template <typename T>
struct RingPlace {
    uint32_t barriers = 0;
    uint32_t ring = 0;
    int split = 0;
    int first_expert = 0;
    int tile_token = 0;

    __device__ explicit RingPlace(const std::byte* memory)
        : barriers(shared_address(memory)), ring((barriers + kRingBarrierBytes + 1023) / 1024 * 1024) {}

    __device__ uint32_t full(int stage) const { return barriers + 8 * stage; }
    __device__ uint32_t empty(int stage) const { return barriers + 8 * (T::kStages + stage); }
    __device__ uint32_t spare_barriers() const { return barriers + 8 * 2 * T::kStages; }
    __device__ uint32_t x(int stage) const { return ring + stage * T::kStageBytes; }
    __device__ uint32_t high(int stage) const { return x(stage) + T::kXBytes; }
    __device__ uint32_t low(int stage) const { return high(stage) + T::kWeightBytes; }
    __device__ float* begin_of_ring(std::byte* memory) const {
        return reinterpret_cast<float*>(memory + (ring - barriers));
    }
    // After the ring.
    __device__ float* room(std::byte* memory) const {
        return begin_of_ring(memory) + T::kStages * T::kStageBytes / 4;
    }
    // The stage of the whole width at which the block's chunk begins.
    __device__ int begin(const RingArgs& args, int chunk) const {
        return (split * T::kChunks + chunk) * args.stages / kRingParts;
    }
    __device__ int stages(const RingArgs& args) const { return begin(args, T::kChunks) - begin(args, 0); }

    // By the two threads that fill the ring; a __syncthreads() follows.
    __device__ void prepare(const RingArgs& args, bool brings_x) const {
        prefetch_map(brings_x ? &args.x : &args.high);
        for (int stage = 0; stage < T::kStages; ++stage) {
            barrier_init(brings_x ? empty(stage) : full(stage), brings_x ? T::kGroups * kGroupArrivals : 1);
        }
        barrier_init_fence();
    }
    // Until the slot of the block's stage i is free.
    __device__ void wait_for_slot(int i) const {
        if (i >= T::kStages) {
            barrier_wait(empty(i % T::kStages), static_cast<uint32_t>(i / T::kStages - 1) & 1);
        }
    }
    __device__ void release(int i) const {
        barrier_arrive_for_all(empty(i % T::kStages), threadIdx.x % 128 == 0);
    }
};

// By one thread: the weights do not wait for the kernel before.
template <typename T>
__device__ __forceinline__ void bring_weights(const RingArgs& args, const RingPlace<T>& place) {
    const int begin = place.begin(args, 0);
    const int count = place.stages(args);
    for (int i = 0; i < count; ++i) {
        const int slot = i % T::kStages;
        const int column = (begin + i) * kRingColumns;
        place.wait_for_slot(i);
        barrier_arrive_expect(place.full(slot), T::kStageBytes);
        copy_box(place.high(slot), &args.high, column, place.first_expert, place.full(slot));
        if constexpr (T::kLow) {
            copy_box(place.low(slot), &args.low, column, place.first_expert, place.full(slot));
        }
    }
}
// By another.
template <typename T>
__device__ __forceinline__ void bring_x(const RingArgs& args, const RingPlace<T>& place) {
    const int begin = place.begin(args, 0);
    const int count = place.stages(args);
    wait_for_previous_kernel();
    let_next_kernel_start();
    const auto start = clock64();
    for (int i = 0; i < count; ++i) {
        const int slot = i % T::kStages;
        while (T::kXPace > 0 && i < T::kStages && clock64() - start < i * T::kXPace) {
        }
        place.wait_for_slot(i);
        copy_box(place.x(slot), &args.x, (begin + i) * kRingColumns, place.tile_token, place.full(slot));
    }
}

// A warpgroup's sums over a chunk of the block's stages.
template <typename T>
__device__ __forceinline__ void multiply_chunk(const RingArgs& args, const RingPlace<T>& place, int chunk,
                                               float (&sums)[T::kGroupExperts / 2]) {
    constexpr int kSteps = kRingRowBytes / kMmaStepBytes;
    const int group = static_cast<int>(threadIdx.x) / 128;
    const uint32_t x_rows = group % T::kTokenGroups * 64 * kRingRowBytes;
    const uint32_t weight_rows = group / T::kTokenGroups * T::kGroupExperts * kRingRowBytes;
    const int first = place.begin(args, chunk) - place.begin(args, 0);
    const int end = place.begin(args, chunk + 1) - place.begin(args, 0);
    for (int i = first; i < end; ++i) {
        const int slot = i % T::kStages;
        barrier_wait(place.full(slot), static_cast<uint32_t>(i / T::kStages) & 1);
        mma_pin(sums);
        mma_begin();
#pragma unroll
        for (int step = 0; step < kSteps; ++step) {
            const uint64_t x = mma_descriptor(place.x(slot) + x_rows + step * kMmaStepBytes);
            mma_shared<false>(sums, x, mma_descriptor(place.high(slot) + weight_rows + step * kMmaStepBytes),
                              i > first || step > 0 ? 1 : 0);
            if constexpr (T::kLow) {
                mma_shared<false>(sums, x,
                                  mma_descriptor(place.low(slot) + weight_rows + step * kMmaStepBytes), 1);
            }
        }
        mma_commit();
        mma_wait<1>();
        mma_pin(sums);
        if (i > first) {
            place.release(i - 1);
        }
    }
    mma_wait<0>();
    mma_pin(sums);
    place.release(end - 1);
}

// The same over all of the block's stages: chunk after chunk, added in float32.
template <typename T>
__device__ __forceinline__ void multiply_chunks(const RingArgs& args, const RingPlace<T>& place,
                                                float (&sums)[T::kGroupExperts / 2]) {
    multiply_chunk(args, place, 0, sums);
#pragma unroll 1
    for (int chunk = 1; chunk < T::kChunks; ++chunk) {
        float more[T::kGroupExperts / 2];
        multiply_chunk(args, place, chunk, more);
#pragma unroll
        for (int i = 0; i < T::kGroupExperts / 2; ++i) {
            sums[i] += more[i];
        }
    }
}

}  // namespace tessera::cuda

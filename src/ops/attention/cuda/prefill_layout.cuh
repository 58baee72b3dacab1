// What the warps of a block of prefill attention share: the tile's description, shared memory and its
// barriers.
#pragma once

#include "ops/attention/cuda/prefill_plan.h"
#include "ops/common/cuda/async_copy.cuh"
#include "ops/common/cuda/cluster.cuh"
#include "ops/common/cuda/reduce.cuh"
#include "ops/common/cuda/shared_access.cuh"
#include "ops/common/cuda/wgmma.cuh"

namespace tessera::cuda::prefill {

inline constexpr int kHeadDim = 128;
inline constexpr int kPageSlots = 64;
inline constexpr int kRows = 64;                    // of q, of a consumer
inline constexpr int kGroup = 128;                  // threads of a warpgroup
inline constexpr int kTurners = 2;                  // fp8: warps that turn V
inline constexpr int kScaleBytes = 4 * kPageSlots;  // of a page's scales of K, of one KV head
inline constexpr float kLog2E = 1.4426950408889634f;

// Named barriers: of each consumer's threads, and two for each pair of warps that take turns.
inline constexpr int kGroupBarrier = 1;
inline constexpr int kTurnBarrier = kGroupBarrier + 2;

// What the blocks' warps need to know of a query tile.
struct Tile {
    int32_t row = 0;  // of q: the tile's first query
    int32_t queries = 0;
    int32_t kv_head = 0;
    int32_t first = 0;  // the tile's first query sees slots up to this one
    int32_t slots = 0;  // the last query sees slots [first_slot, slots)
    int32_t steps = 0;  // KV tiles; -1: no more tiles
    int32_t sequence = 0;
    int32_t list = 0;
};

struct KernelArgs {
    CUtensorMap q_map;  // [row][head][128], boxes of a tile's queries and heads
    CUtensorMap k_map;  // [page][head][slot][128], boxes of a page's slots
    CUtensorMap v_map;
    PrefillCudaArgs prefill;
    PrefillPlan plan;
    int32_t group = 0;
    uint32_t group_inverse = 0;  // 2^16 / group, rounded up: to divide a tile's rows by it
    int32_t tile_queries = 0;
    uint32_t zero = 0;  // what the compiler does not know
};

// Rings of 2^n buffers: the buffer of the count-th use, and the parity of its barriers' phase.
template <int Stages>
__device__ __forceinline__ int stage_of(int count) {
    static_assert((Stages & (Stages - 1)) == 0);
    return count & (Stages - 1);
}
template <int Stages>
__device__ __forceinline__ uint32_t parity_of(int count) {
    return count / Stages & 1;
}

// Shared memory, in bytes from a 1024-byte aligned begin. Every ring has a barrier `full` and one `empty` for
// each buffer.
template <bool Fp8>
struct Layout {
    static constexpr int kConsumers = kPrefillRows / kRows;
    static constexpr int kThreads = (kConsumers + 1) * kGroup;
    static constexpr int kQueryStages = Fp8 ? 1 : 2;
    static constexpr int kTileStages = 2 * kQueryStages;  // consumers may store while the next ones come
    static constexpr int kKeyStages = Fp8 ? 4 : 2;
    static constexpr int kValueStages = 2;
    static constexpr int kTurnedStages = Fp8 ? 2 : 1;
    static constexpr int kHalf =
        kPrefillKvSlots * kSwizzleRowBytes;  // 128 rows of 64 bfloat16 or of 128 e4m3
    static constexpr int kQueryHalf = kPrefillRows * kSwizzleRowBytes;
    static constexpr int kKvBytes = (Fp8 ? 1 : 2) * kHalf;
    // bfloat16: a V has a third block of columns, of which 8 are read (write_sum_columns()).
    static constexpr int kValueStride = kKvBytes + (Fp8 ? 0 : kHalf);
    // The rows of V^T, and 8 that add up the weights (write_sum_rows()).
    static constexpr int kTurnedBytes = (kHeadDim + 8) * kSwizzleRowBytes;

    static constexpr int kQueries = 0;  // bfloat16
    static constexpr int kNarrowQueries = kQueries + kQueryStages * 2 * kQueryHalf;
    static constexpr int kKeys = kNarrowQueries + (Fp8 ? kQueryHalf : 0);
    static constexpr int kValues = kKeys + kKeyStages * kKvBytes;
    static constexpr int kTurned = kValues + kValueStages * kValueStride;
    static constexpr int kKeyScales =
        kTurned + (Fp8 ? kTurnedStages * kTurnedBytes : 0);  // float32, a slot's
    static constexpr int kTiles = kKeyScales + (Fp8 ? kKeyStages * 2 * kScaleBytes : 0);
    static constexpr int kKvTiles = kTiles + kTileStages * static_cast<int>(sizeof(Tile));
    static constexpr int kScales = kKvTiles + 4 * (kKeyStages + kValueStages);
    static constexpr int kQueryBarriers = (kScales + (Fp8 ? 4 * kPrefillRows : 0) + 7) / 8 * 8;
    static constexpr int kKeyBarriers = kQueryBarriers + 16 * kQueryStages;
    static constexpr int kValueBarriers = kKeyBarriers + 16 * kKeyStages;
    static constexpr int kTurnedBarriers = kValueBarriers + 16 * kValueStages;
    static constexpr int kWorkBarriers = kTurnedBarriers + 16 * kTurnedStages;  // of a cluster
    static constexpr int kWork = (kWorkBarriers + 16 + 15) / 16 * 16;
    static constexpr int kBytes = kWork + 16 + 1024;
    static_assert(kBytes <= 227 * 1024);
};

__device__ __forceinline__ uint32_t full_barrier(uint32_t ring, int stage) {
    return ring + 16 * stage;
}
__device__ __forceinline__ uint32_t empty_barrier(uint32_t ring, int stage) {
    return ring + 16 * stage + 8;
}

__device__ __forceinline__ void write_tile(uint32_t to, const Tile& tile) {
    store_shared(to, make_uint4(tile.row, tile.queries, tile.kv_head, tile.first));
    store_shared(to + 16, make_uint4(tile.slots, tile.steps, tile.sequence, tile.list));
}
__device__ __forceinline__ Tile read_tile(uint32_t from) {
    const uint4 low = load_shared_16(from);
    const uint4 high = load_shared_16(from + 16);
    return {static_cast<int>(low.x),  static_cast<int>(low.y),  static_cast<int>(low.z),
            static_cast<int>(low.w),  static_cast<int>(high.x), static_cast<int>(high.y),
            static_cast<int>(high.z), static_cast<int>(high.w)};
}

// Whether some slots of the KV tile are of no sequence or not yet there, so that they may hold anything.
__device__ __forceinline__ bool has_unseen(const KernelArgs& args, const Tile& tile, int kv_tile) {
    return kv_tile * kPrefillKvSlots < args.prefill.plan.first_slot ||
           (kv_tile + 1) * kPrefillKvSlots > tile.slots;
}

// Read anew at each call, so that the compiler does not hold all that depends on it in registers.
__device__ __forceinline__ int this_lane() {
    int lane;
    asm volatile("mov.u32 %0, %%laneid;" : "=r"(lane));
    return lane;
}

// Tells that a buffer, which the blocks of a cluster fill together, is free.
template <int Blocks>
__device__ __forceinline__ void leave_buffer(uint32_t barrier) {
    barrier_arrive(barrier);
    if (Blocks == 2) {
        barrier_arrive_in(barrier, cluster_rank() ^ 1);
    }
}

template <bool Fp8, bool Scaled, int Blocks>
__device__ __forceinline__ void init_barriers(uint32_t base) {
    using L = Layout<Fp8>;
    const auto init = [](uint32_t ring, int stages, int full, int empty) {
        for (int stage = 0; stage < stages; ++stage) {
            barrier_init(full_barrier(ring, stage), full);
            barrier_init(empty_barrier(ring, stage), empty);
        }
    };
    constexpr int kConsumers = L::kConsumers * kGroupArrivals;
    constexpr int kTurned = kTurners * kWarpArrivals;
    init(base + L::kQueryBarriers, L::kQueryStages, 1, kConsumers + (Fp8 ? kTurned : 0));
    // All of a consumer's threads read the scales of K.
    init(base + L::kKeyBarriers, L::kKeyStages, 1, Scaled ? L::kConsumers * kGroup : Blocks * kConsumers);
    init(base + L::kValueBarriers, L::kValueStages, 1, Blocks * (Fp8 ? kTurned : kConsumers));
    init(base + L::kTurnedBarriers, L::kTurnedStages, kTurned, kConsumers);
    init(base + L::kWorkBarriers, 1, 1, 1);
    barrier_init_fence();
}

}  // namespace tessera::cuda::prefill

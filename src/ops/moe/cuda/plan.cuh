// What the experts' kernel needs to know of the routing: the (token, expert) pairs sorted by expert, and the
// items that it works through.
#pragma once

#include <cstdint>

#include <cuda_bf16.h>

#include "ops/common/cuda/async_copy.cuh"
#include "ops/common/cuda/cluster.cuh"
#include "ops/common/cuda/convert.cuh"
#include "ops/common/cuda/dependent_launch.cuh"
#include "ops/moe/cuda/plan.h"
#include "ops/moe/cuda/quantize_row.cuh"

namespace tessera::cuda {

inline constexpr int kPlanThreads = 1024;
inline constexpr int kPlanPairs = 2048;  // from here on by a cluster of blocks
inline constexpr int kPlanCluster = 8;
inline constexpr int kPlanKept = 4;  // pairs of a thread that it keeps in registers

inline constexpr int kQuantizeWarps = 8;  // of a row
inline constexpr int kQuantizeKept = 4;   // pieces of eight that a thread holds: hidden at most 8192
inline constexpr int kQuantizeRows = kPlanThreads / 32 / kQuantizeWarps;  // of a block

__device__ inline void plan_quantize_rows(const PlanArgs& args, int block) {
    __shared__ float warps[kPlanThreads / 32];
    constexpr int kThreads = 32 * kQuantizeWarps;
    const int warp = static_cast<int>(threadIdx.x / 32);
    const int thread = static_cast<int>(threadIdx.x % kThreads);
    const int row = block * kQuantizeRows + warp / kQuantizeWarps;
    const int64_t at = static_cast<int64_t>(min(row, args.tokens - 1)) * args.hidden;
    const QuantizeRow work{
        .from = args.x + at, .to = args.x8 + at, .scale = args.x_scale + row, .count = args.hidden};
    RowPieces<kQuantizeKept> pieces;
    pieces.load(work, thread, kThreads);
    warps[warp] = pieces.largest();
    __syncthreads();
    if (row < args.tokens) {
        pieces.store_scaled<kQuantizeWarps>(work, thread, warps + warp / kQuantizeWarps * kQuantizeWarps);
    }
}

// Inclusive prefix sums over the first `warps` of the block, of three values at once.
__device__ inline int3 block_prefix(int3 value, int3* sums, int warps) {
    const int lane = static_cast<int>(threadIdx.x % 32);
    const int warp = static_cast<int>(threadIdx.x / 32);
    const auto scan = [lane](int3 v) {
        for (int offset = 1; offset < 32; offset *= 2) {
            const int x = __shfl_up_sync(0xFFFFFFFFu, v.x, offset);
            const int y = __shfl_up_sync(0xFFFFFFFFu, v.y, offset);
            const int z = __shfl_up_sync(0xFFFFFFFFu, v.z, offset);
            v.x += lane >= offset ? x : 0;
            v.y += lane >= offset ? y : 0;
            v.z += lane >= offset ? z : 0;
        }
        return v;
    };
    value = scan(value);
    if (lane == 31) {
        sums[warp] = value;
    }
    group_barrier(1, 32 * warps);
    const int3 all = scan(lane < warp ? sums[lane] : make_int3(0, 0, 0));
    return make_int3(value.x + __shfl_sync(0xFFFFFFFFu, all.x, 31),
                     value.y + __shfl_sync(0xFFFFFFFFu, all.y, 31),
                     value.z + __shfl_sync(0xFFFFFFFFu, all.z, 31));
}

// Counting sort and items, by one cluster: each block sorts a stretch of the pairs. 64 tokens have 512 pairs,
// 4,096 tokens 32,768. Rows within an expert are in no fixed order; no result depends on it.
__global__ void __launch_bounds__(kPlanThreads, 1) plan_kernel(PlanArgs args) {
    __shared__ int32_t count[kExpertsMax];
    __shared__ int32_t begin[kExpertsMax];
    __shared__ int3 sums[kPlanThreads / 32];
    static_assert(kPlanThreads == kExpertsMax && kPlanThreads == 32 * 32);
    const int thread = static_cast<int>(threadIdx.x);
    const auto rank = static_cast<int>(cluster_rank());
    const auto blocks = static_cast<int>(cluster_size());
    const int pairs = args.tokens * args.k;
    if (args.x == nullptr) {
        let_next_kernel_start();  // its first weights need nothing of this
    }
    if (static_cast<int>(blockIdx.x) >= blocks) {
        wait_for_previous_kernel();
        let_next_kernel_start();
        plan_quantize_rows(args, static_cast<int>(blockIdx.x) - blocks);
        return;
    }
    const int stretch = (pairs + blocks - 1) / blocks;
    const int end = min(pairs, (rank + 1) * stretch);
    count[thread] = 0;
    __syncthreads();
    wait_for_previous_kernel();
    let_next_kernel_start();
    for (int i = rank * kPlanThreads + thread; i < args.counters_count; i += blocks * kPlanThreads) {
        args.counters[i] = 0;
    }
    for (int i = rank * kPlanThreads + thread; i < args.more_counters_count; i += blocks * kPlanThreads) {
        args.more_counters[i] = 0;
    }
    const int begins = rank * stretch + thread;
    int expert[kPlanKept];
    int place[kPlanKept];
#pragma unroll
    for (int n = 0; n < kPlanKept; ++n) {
        expert[n] = begins + n * kPlanThreads < end ? args.chosen[begins + n * kPlanThreads] : -1;
    }
#pragma unroll
    for (int n = 0; n < kPlanKept; ++n) {
        if (expert[n] >= 0 && expert[n] < args.experts) {
            place[n] = atomicAdd(&count[expert[n]], 1);
        } else {
            expert[n] = -1;
        }
    }
    for (int i = begins + kPlanKept * kPlanThreads; i < end; i += kPlanThreads) {
        const int other = args.chosen[i];
        args.slots[i] = other >= 0 && other < args.experts ? atomicAdd(&count[other], 1) : -1;
    }
    cluster_sync();
    // A thread an expert; the other warps would only take the scheduler's time.
    const int warps = max((args.experts + 31) / 32, 1);
    if (thread < 32 * warps) {
        int mine = 0;
        int before = 0;
#pragma unroll
        for (int other = 0; other < kPlanCluster; ++other) {
            const int theirs =
                other < blocks ? load_from_block(shared_address(count + thread), static_cast<uint32_t>(other))
                               : 0;
            before += other < rank ? theirs : 0;
            mine += theirs;
        }
        const auto [tiles, rows] = experts_cut(mine, args.tile_max);
        // Of these an early item is apart, even without rows.
        const bool early = thread < args.early_items;
        const int further = early ? max(tiles - 1, 0) : tiles;
        const int3 ends = block_prefix(make_int3(mine, tiles, further), sums, warps);
        const int first = ends.x - mine;
        begin[thread] = first + before;
        if (rank == 0) {
            for (int i = 0; i < max(tiles, early ? 1 : 0); ++i) {
                const ExpertsItem item{
                    .expert = thread,
                    .row = first + i * rows,
                    .rows = min(rows, mine - i * rows),
                    .place = early && i == 0 ? thread : args.early_items + ends.z - tiles + i};
                args.items[item.place] = item;
                if (i < tiles) {
                    args.down_items[ends.y - tiles + i] = item;
                }
            }
            if (thread == 32 * warps - 1) {
                args.routed_items[0] = args.early_items + ends.z;
                args.routed_items[1] = ends.y;
            }
        }
    }
    __syncwarp();
    cluster_arrive();  // none of these blocks ends before the others have read its counts
    __syncthreads();
#pragma unroll
    for (int n = 0; n < kPlanKept; ++n) {
        const int i = begins + n * kPlanThreads;
        if (i < end) {
            const int row = expert[n] >= 0 ? begin[expert[n]] + place[n] : -1;
            args.slots[i] = row;
            if (row >= 0) {
                args.row_source[row] = i / args.k;
            }
        }
    }
    for (int i = begins + kPlanKept * kPlanThreads; i < end; i += kPlanThreads) {
        if (args.slots[i] >= 0) {
            const int row = begin[args.chosen[i]] + args.slots[i];
            args.row_source[row] = i / args.k;
            args.slots[i] = row;
        }
    }
    cluster_wait();
}

// A warp copies a row.
inline constexpr int kSortRowsThreads = 256;

__global__ void __launch_bounds__(kSortRowsThreads) sort_rows_kernel(SortRowsArgs args) {
    wait_for_previous_kernel();
    let_next_kernel_start();
    const int pair = static_cast<int>(blockIdx.x * (kSortRowsThreads / 32) + threadIdx.x / 32);
    if (pair >= args.pairs) {
        return;
    }
    const int row = args.slots[pair];
    if (row < 0) {
        return;
    }
    const int64_t from = static_cast<int64_t>(pair / args.k) * args.row_bytes;
    const int64_t to = static_cast<int64_t>(row) * args.row_bytes;
#pragma unroll 8
    for (int i = static_cast<int>(threadIdx.x % 32) * 16; i < args.row_bytes; i += 32 * 16) {
        *reinterpret_cast<uint4*>(args.sorted + to + i) = *reinterpret_cast<const uint4*>(args.x + from + i);
    }
}

}  // namespace tessera::cuda

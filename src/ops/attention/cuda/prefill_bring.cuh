// Prefill attention's first warpgroup: the warp that brings q and pages, and the warps that turn V.
#pragma once

#include "ops/attention/cuda/prefill_layout.cuh"
#include "ops/common/cuda/dependent_launch.cuh"
#include "ops/common/cuda/shared_access.cuh"

namespace tessera::cuda::prefill {

// ---- the warp that brings

// Of an item's tiles each block of a cluster has one, and both bring what the longer one sees; a block alone
// takes them one after the other.
template <int Blocks>
__device__ __forceinline__ Tile make_tile(const KernelArgs& args, int work) {
    const PrefillPlanCudaArgs& plan = args.prefill.plan;
    const int place = Blocks == 2 ? static_cast<int>(cluster_rank()) : work % args.plan.item_tiles;
    const int number = Blocks == 2 ? work : work / args.plan.item_tiles;
    PrefillItem item{};
    if (number < args.plan.items_max) {
        item = args.plan.items[number];  // beside the count
    }
    const int count = *args.plan.count;
    if (number >= count * plan.shape.kv_heads) {
        return {.steps = -1};
    }
    if (number >= count) {
        item = args.plan.items[number % count];
    }
    const int before = place * args.tile_queries;
    Tile tile{.row = item.row + before,
              .queries = min(max(item.queries - before, 0), args.tile_queries),
              .kv_head = number / count,
              .first = item.first + before,
              .sequence = item.sequence};
    tile.slots = Blocks == 2 ? item.first + item.queries : tile.first + tile.queries;
    if (Blocks == 1 && tile.queries == 0) {
        return tile;
    }
    tile.list = (tile.row / args.tile_queries + item.sequence) * plan.shape.kv_heads + tile.kv_head;
    tile.steps = tile.slots > plan.first_slot ? (tile.slots + kPrefillKvSlots - 1) / kPrefillKvSlots : 0;
    if (args.prefill.kv_tiles.counts != nullptr) {
        tile.steps = min(tile.steps, args.prefill.kv_tiles.counts[tile.list]);
    }
    return tile;
}

// The KV tile of step `step`, the last first.
__device__ __forceinline__ int kv_tile_of(const PrefillKvTiles& kv_tiles, const Tile& tile, int step) {
    const int place = tile.steps - 1 - step;
    return kv_tiles.counts == nullptr
               ? place
               : kv_tiles.tiles[static_cast<int64_t>(tile.list) * kv_tiles.tiles_max + place];
}

// Scaled: each KV tile of K has its slots' scales beside it.
template <bool Fp8, bool Scaled, int Blocks>
struct Bringer {
    using L = Layout<Fp8>;
    const KernelArgs& args;
    uint32_t base;
    int tiles = 0;
    int steps = 0;
    int kv_tile = 0;  // of a lane's step, and one of its pages
    int page = 0;

    // Two pages of one KV head's K or V; a page of -1 lies outside of the map and becomes zeros. Each block
    // of a cluster brings one of them for both.
    __device__ __forceinline__ void bring_pages(uint32_t to, const CUtensorMap* map, int kv_head,
                                                const int (&pages)[2], uint32_t barrier) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const uint32_t page = to + i * kPageSlots * kSwizzleRowBytes;
#pragma unroll
            for (int half = 0; half < (Fp8 ? 1 : 2); ++half) {
                const int place[4] = {64 * half, 0, kv_head, pages[i]};
                if (Blocks == 1) {
                    copy_box(page + half * L::kHalf, map, place, barrier);
                } else if (i == static_cast<int>(cluster_rank())) {
                    copy_box_to_both(page + half * L::kHalf, map, place, barrier);
                }
            }
        }
    }

    // The scales of each slot's K, of the pages that there are.
    __device__ __forceinline__ void bring_scales(uint32_t to, int kv_head, const int (&pages)[2],
                                                 uint32_t barrier) {
        const PagedKvCuda& kv = args.prefill.kv;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            if (pages[i] >= 0) {
                copy_bulk(to + i * kScaleBytes,
                          kv.pool + pages[i] * kv.page_stride + kv.k_scales_offset + kv_head * kScaleBytes,
                          kScaleBytes, barrier);
            }
        }
    }

    __device__ __forceinline__ void bring_step(const Tile& tile, int kv_tile, const int (&pages)[2]) {
        const int key = stage_of<L::kKeyStages>(steps);
        barrier_wait(empty_barrier(base + L::kKeyBarriers, key), parity_of<L::kKeyStages>(steps) ^ 1);
        store_shared(base + L::kKvTiles + 4 * key, static_cast<uint32_t>(kv_tile));
        const uint32_t keys_full = full_barrier(base + L::kKeyBarriers, key);
        const int scales = Scaled ? ((pages[0] >= 0) + (pages[1] >= 0)) * kScaleBytes : 0;
        barrier_arrive_expect(keys_full, L::kKvBytes + scales);
        bring_pages(base + L::kKeys + key * L::kKvBytes, &args.k_map, tile.kv_head, pages, keys_full);
        if (Scaled) {
            bring_scales(base + L::kKeyScales + 2 * key * kScaleBytes, tile.kv_head, pages, keys_full);
        }
        const int value = stage_of<L::kValueStages>(steps);
        barrier_wait(empty_barrier(base + L::kValueBarriers, value), parity_of<L::kValueStages>(steps) ^ 1);
        store_shared(base + L::kKvTiles + 4 * (L::kKeyStages + value), static_cast<uint32_t>(kv_tile));
        const uint32_t values_full = full_barrier(base + L::kValueBarriers, value);
        barrier_arrive_expect(values_full, L::kKvBytes);
        bring_pages(base + L::kValues + value * L::kValueStride, &args.v_map, tile.kv_head, pages,
                    values_full);
    }

    // Lanes 2 i and 2 i + 1 look up the pages of step i of the next 16.
    __device__ __forceinline__ void look_up_pages(const Tile& tile, int step) {
        const PagedKvCuda& kv = args.prefill.kv;
        const int32_t* table = kv.page_tables + static_cast<int64_t>(tile.sequence) * kv.pages_max;
        const int pages_end = (tile.slots + kPageSlots - 1) / kPageSlots;
        const int mine = min(step + this_lane() / 2, tile.steps - 1);
        kv_tile = kv_tile_of(args.prefill.kv_tiles, tile, mine);
        page = 2 * kv_tile + this_lane() % 2 < pages_end ? table[2 * kv_tile + this_lane() % 2] : -1;
    }
    // The first step's pages are known.
    __device__ __forceinline__ void bring_kv(const Tile& tile) {
#pragma unroll 1
        for (int step = 0; step < tile.steps; ++step) {
            if (step % 16 == 0 && step > 0) {
                look_up_pages(tile, step);
            }
            const int from = 2 * (step % 16);
            const int pages[2] = {__shfl_sync(kFullWarp, page, from), __shfl_sync(kFullWarp, page, from + 1)};
            const int this_tile = __shfl_sync(kFullWarp, kv_tile, from);
            if (this_lane() == 0) {
                bring_step(tile, this_tile, pages);
            }
            __syncwarp();
            ++steps;
        }
    }

    // The next work, of the whole grid.
    __device__ __forceinline__ int take_work() {
        return static_cast<int>(gridDim.x) / Blocks + atomicAdd(args.plan.next, 1);
    }
    // The first block of a cluster takes the work of both.
    __device__ __forceinline__ int share_work() {
        const uint32_t full = full_barrier(base + L::kWorkBarriers, 0);
        const uint32_t empty = empty_barrier(base + L::kWorkBarriers, 0);
        const uint32_t parity = (tiles - 1) % 2;
        if (cluster_rank() == 0) {
            const int work = take_work();
            barrier_wait(empty, parity ^ 1);
            const float all[4] = {__int_as_float(work), 0, 0, 0};
            store_to_block(address_in_block(base + L::kWork, 1), all, address_in_block(full, 1));
            return work;
        }
        barrier_arrive_expect(full, 16);
        barrier_wait(full, parity);
        const auto work = static_cast<int>(load_shared_4(base + L::kWork));
        barrier_arrive_in(empty, 0);
        return work;
    }

    // A tile with its first pages. The first one's need nothing of the kernel before, if settled.
    __device__ __forceinline__ Tile next_tile() {
        int work = static_cast<int>(blockIdx.x) / Blocks;
        if (tiles > 0) {
            if (this_lane() == 0) {
                work = Blocks == 2 ? share_work() : take_work();
            }
            work = __shfl_sync(kFullWarp, work, 0);
        } else if (!args.prefill.settled) {
            wait_for_previous_kernel();
        }
        const Tile tile = make_tile<Blocks>(args, work);
        if (tile.steps > 0) {
            look_up_pages(tile, 0);
        }
        if (tiles == 0) {
            wait_for_previous_kernel();
        }
        return tile;
    }

    __device__ __forceinline__ void run() {
        for (;; ++tiles) {
            const Tile tile = next_tile();
            const int query = stage_of<L::kQueryStages>(tiles);
            if (this_lane() == 0) {
                barrier_wait(empty_barrier(base + L::kQueryBarriers, query),
                             parity_of<L::kQueryStages>(tiles) ^ 1);
                const uint32_t barrier = full_barrier(base + L::kQueryBarriers, query);
                write_tile(base + L::kTiles + stage_of<L::kTileStages>(tiles) * sizeof(Tile), tile);
                if (tile.steps < 0) {
                    barrier_arrive(barrier);
                } else {
                    const uint32_t to = base + L::kQueries + query * 2 * L::kQueryHalf;
                    const int head = tile.kv_head * args.group;
                    barrier_arrive_expect(barrier, 2 * kSwizzleRowBytes * args.tile_queries * args.group);
                    copy_box(to, &args.q_map, {0, head, tile.row}, barrier);
                    copy_box(to + L::kQueryHalf, &args.q_map, {64, head, tile.row}, barrier);
                }
            }
            if (tile.steps < 0) {
                break;
            }
            bring_kv(tile);
        }
        const bool counts = Blocks == 1 || cluster_rank() == 0;
        if (this_lane() == 0 && counts &&
            atomicAdd(args.plan.finished, 1) == static_cast<int>(gridDim.x) / Blocks - 1) {
            *args.plan.next = 0;
            *args.plan.finished = 0;
        }
    }
};

// ---- fp8: the warps that turn V

// Behind the 128 rows of each V^T lie 8 more that no turning touches: row j is one at each eighth place and
// zero elsewhere. So the product with V adds up the weights as it takes them, rounded, in 8 parts of few
// enough weights for the tensor cores' sums. Pieces are exchanged by the swizzle, but all of a row's are
// alike.
__device__ __forceinline__ void write_sum_rows(uint32_t base, int thread) {
    using L = Layout<true>;
    constexpr uint32_t kOne = 0x38;  // in e4m3
    const int row = thread / 8 % 8;
    const uint32_t low = row < 4 ? kOne << 8 * row : 0;
    const uint32_t high = row < 4 ? 0 : kOne << 8 * (row - 4);
    for (int stage = 0; stage < L::kTurnedStages; ++stage) {
        const uint32_t rows = base + L::kTurned + stage * L::kTurnedBytes + kHeadDim * kSwizzleRowBytes;
        store_shared(rows + thread % 64 * 16, make_uint4(low, high, low, high));
    }
    fence_proxy_async();
}

// Page `half` of a KV tile, [64 slots][128], becomes [128][64 slots]: bytes 64 half .. of the rows at `to`.
// Of 16 slots, slot 8 b + 2 t + c comes to place 4 t + 2 b + c. Masked: slots outside [seen_first, seen_end)
// become zeros.
template <bool Masked>
__device__ __forceinline__ void turn_page(uint32_t from, uint32_t to, int half, int seen_first,
                                          int seen_end) {
    const int lane = this_lane();
    const int i = lane % 8;  // of matrix lane / 8: which row's address this lane gives
    const uint32_t load = from + swizzle_128(half * kPageSlots + lane / 8 % 2 * 8 + i, lane / 16);
    // A lane holds rows 2 g and 2 g + 1 of a matrix pair. The first matrix stored has the even rows of the
    // lower half and the odd ones of the upper, so that its rows lie in different banks.
    const uint32_t store = to + swizzle_128(lane / 16 * 16 + 2 * i + ((i / 4) ^ (lane / 8 % 2)), half * 4);
    const uint32_t select = lane < 16 ? 0x6420 : 0x7531;
#pragma unroll
    for (int slots = 0; slots < 4; ++slots) {  // in 16
        uint32_t raw[4][4];                    // of 32 columns each
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            load_matrices_transposed((load ^ j << 5) + slots * 16 * kSwizzleRowBytes, raw[j]);
        }
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            if (Masked) {
#pragma unroll
                for (int m = 0; m < 4; ++m) {
                    const int slot = slots * 16 + m % 2 * 8 + lane % 4 * 2;
                    raw[j][m] &= (slot >= seen_first && slot < seen_end ? 0x0000FFFFu : 0) |
                                 (slot + 1 >= seen_first && slot + 1 < seen_end ? 0xFFFF0000u : 0);
                }
            }
            const uint32_t turned[4] = {__byte_perm(raw[j][0], raw[j][1], select),
                                        __byte_perm(raw[j][0], raw[j][1], select ^ 0x1111),
                                        __byte_perm(raw[j][2], raw[j][3], select),
                                        __byte_perm(raw[j][2], raw[j][3], select ^ 0x1111)};
            store_matrices((store ^ slots << 4) + j * 32 * kSwizzleRowBytes, turned);
        }
    }
}

template <int Blocks>
__device__ __forceinline__ void turn_values(const KernelArgs& args, uint32_t base, int half) {
    using L = Layout<true>;
    int steps = 0;
    for (int tiles = 0;; ++tiles) {
        barrier_wait(full_barrier(base + L::kQueryBarriers, 0), parity_of<1>(tiles));
        const Tile tile = read_tile(base + L::kTiles + stage_of<L::kTileStages>(tiles) * sizeof(Tile));
        __syncwarp();
        barrier_arrive_for_all(empty_barrier(base + L::kQueryBarriers, 0), this_lane() == 0);
        if (tile.steps < 0) {
            return;
        }
#pragma unroll 1
        for (const int end = steps + tile.steps; steps < end; ++steps) {
            const int turned = stage_of<L::kTurnedStages>(steps);
            const int value = stage_of<L::kValueStages>(steps);
            barrier_wait(empty_barrier(base + L::kTurnedBarriers, turned),
                         parity_of<L::kTurnedStages>(steps) ^ 1);
            barrier_wait(full_barrier(base + L::kValueBarriers, value), parity_of<L::kValueStages>(steps));
            const int kv_tile =
                static_cast<int>(load_shared_4(base + L::kKvTiles + 4 * (L::kKeyStages + value)));
            const int first = kv_tile * kPrefillKvSlots + half * kPageSlots;
            const uint32_t from = base + L::kValues + value * L::kKvBytes;
            const uint32_t to = base + L::kTurned + turned * L::kTurnedBytes;
            const int seen_first = args.prefill.plan.first_slot - first;
            const int seen_end = tile.slots - first;
            if (seen_first > 0 || seen_end < kPageSlots) {
                turn_page<true>(from, to, half, seen_first, seen_end);
            } else {
                turn_page<false>(from, to, half, seen_first, seen_end);
            }
            fence_proxy_async();
            __syncwarp();
            if (kAllArrive || this_lane() == 0) {
                barrier_arrive(full_barrier(base + L::kTurnedBarriers, turned));
                leave_buffer<Blocks>(empty_barrier(base + L::kValueBarriers, value));
            }
        }
    }
}

}  // namespace tessera::cuda::prefill

// How the clusters of narrow_w4.cuh and narrow_fp8.cuh share the experts' rows: each block works it out for
// itself.
#pragma once

#include <algorithm>
#include <cstdint>

#include "ops/common/cuda/async_copy.cuh"
#include "ops/common/cuda/cluster.cuh"
#include "ops/moe/cuda/experts.cuh"
#include "ops/moe/cuda/narrow.h"

namespace tessera::cuda {

inline constexpr int kNarrowThreads = 512;
inline constexpr int kNarrowExpertsMax = 2 * kNarrowThreads;
inline constexpr uint16_t kNarrowNone = 0xFFFF;  // in place of an expert

// Rows that one expert works on together.
struct NarrowItem {
    int32_t expert = 0;
    int32_t rows = 0;
    int32_t first = 0;  // of the expert's pairs, if others have other items of it; else -1
};

// In shared memory. An expert's place: of how many of its pairs are listed, and above them the item of all of
// its rows, + 1; 0 if the cluster has none, or not all.
struct NarrowPlan {
    uint16_t* ids = nullptr;      // [kNarrowPairsMax]: the pairs' experts
    int32_t* counts = nullptr;    // [kNarrowExpertsMax], then the places
    int32_t* warps = nullptr;     // [kNarrowThreads / 32]
    NarrowItem* items = nullptr;  // [kNarrowItemsMax + 1]: this cluster's, then one without rows
    // [kNarrowItemsMax, RowsMax]: the items' rows; of the expert of all tokens `pairs` + the token
    uint16_t* pairs = nullptr;
};

// On the host: whether the plan has room for a call whose items have up to rows_max rows; shared_tokens as in
// NarrowChoices. An expert has no more rows than there are tokens, since a token's ids differ, and so no two
// items in one cluster.
inline bool narrow_plan_fits(const NarrowSizes& sizes, int64_t rows_max, int64_t shared_tokens,
                             int64_t multiprocessors) {
    const int64_t clusters = multiprocessors / 2;
    const int64_t pairs = sizes.tokens * sizes.k;
    const int64_t items =
        pairs / rows_max + std::min(sizes.experts, pairs) + (shared_tokens + rows_max - 1) / rows_max;
    return sizes.width == kNarrowWidth && pairs <= kNarrowPairsMax && sizes.experts <= kNarrowExpertsMax &&
           items <= clusters * kNarrowItemsMax && sizes.tokens / rows_max < clusters;
}

// By all threads: the cluster's items. All items, first those of all tokens, then in the order of the
// experts, are dealt to the clusters in turn; an expert has no more items than there are clusters. Returns
// how many there are. The code is kept short: it comes from memory.
template <int RowsMax>
__device__ __forceinline__ int narrow_plan(const NarrowChoices& args, const NarrowPlan& plan) {
    const int clusters = static_cast<int>(gridDim.x / 2);
    const int cluster = static_cast<int>(blockIdx.x / 2);
    const ExpertsCut shared = experts_cut(args.shared_tokens, RowsMax);
    const int thread = static_cast<int>(threadIdx.x);
    const int lane = thread % 32;
    auto* counts = reinterpret_cast<int2*>(plan.counts) + thread;
    *counts = make_int2(0, 0);
    __syncthreads();
#pragma unroll 4
    for (int i = thread; i < args.pairs; i += kNarrowThreads) {
        const int id = args.chosen[i];
        const bool valid = id >= 0 && id < args.experts;
        plan.ids[i] = valid ? static_cast<uint16_t>(id) : kNarrowNone;
        if (valid) {
            atomicAdd(plan.counts + id, 1);
        }
    }
    __syncthreads();
    const int mine[2] = {counts->x, counts->y};
    const int items = experts_cut(mine[0], RowsMax).items + experts_cut(mine[1], RowsMax).items;
    int upto = items;  // this thread's experts among them
#pragma unroll
    for (int offset = 1; offset < 32; offset *= 2) {
        const int before = __shfl_up_sync(0xFFFFFFFFu, upto, offset);
        upto += lane >= offset ? before : 0;
    }
    if (lane == 31) {
        plan.warps[thread / 32] = upto;
    }
    __syncthreads();
    const int others = plan.warps[lane % (kNarrowThreads / 32)];
    const int total = shared.items + __reduce_add_sync(0xFFFFFFFFu, lane < kNarrowThreads / 32 ? others : 0);
    int index = shared.items + upto - items + __reduce_add_sync(0xFFFFFFFFu, lane < thread / 32 ? others : 0);
    for (int i = thread; i * clusters + cluster < shared.items; i += kNarrowThreads) {
        const int first = (i * clusters + cluster) * shared.rows;
        plan.items[i] = {
            .expert = args.experts, .rows = min(shared.rows, args.shared_tokens - first), .first = -1};
    }
    int place = 0;
#pragma unroll 1
    for (int i = 0; i < 2; ++i) {
        const int count = i == 0 ? mine[0] : mine[1];
        const ExpertsCut cut = experts_cut(count, RowsMax);
        int item = index / clusters;
        int piece = cluster - index % clusters;
        if (piece < 0) {
            piece += clusters;
            ++item;
        }
        place = 0;
        if (piece < cut.items) {
            const int first = piece * cut.rows;
            plan.items[item] = {.expert = 2 * thread + i,
                                .rows = min(cut.rows, count - first),
                                .first = cut.items > 1 ? first : -1};
            place = cut.items > 1 ? 0 : (item + 1) << 16;
        }
        plan.counts[2 * thread + i] = place;
        index += cut.items;
    }
    for (int i = (total - cluster + clusters - 1) / clusters + thread; i <= kNarrowItemsMax;
         i += kNarrowThreads) {
        plan.items[i] = {};
    }
    __syncthreads();
    return total;
}

// By the cluster's first block: the pairs of its items, into both blocks.
template <int RowsMax>
__device__ __forceinline__ void narrow_list(const NarrowChoices& args, const NarrowPlan& plan) {
    const int clusters = static_cast<int>(gridDim.x / 2);
    const int cluster = static_cast<int>(blockIdx.x / 2);
    const int thread = static_cast<int>(threadIdx.x);
    const int lane = thread % 32;
    const auto list = [&](int item, int row, int pair) {
        uint16_t* to = plan.pairs + item * RowsMax + row;
        *to = static_cast<uint16_t>(pair);
        asm volatile("st.shared::cluster.u16 [%0], %1;" ::"r"(address_in_block(shared_address(to), 1)),
                     "h"(static_cast<uint16_t>(pair))
                     : "memory");
    };
    const ExpertsCut shared = experts_cut(args.shared_tokens, RowsMax);
    for (int i = thread / RowsMax; i * clusters + cluster < shared.items; i += kNarrowThreads / RowsMax) {
        const int row = thread % RowsMax;
        if (row < plan.items[i].rows) {
            list(i, row, args.pairs + (i * clusters + cluster) * shared.rows + row);
        }
    }
    // The rows of an item are in no fixed order;
#pragma unroll 4
    for (int pair = thread; pair < args.pairs; pair += kNarrowThreads) {
        const int id = plan.ids[pair];
        if (id != kNarrowNone && plan.counts[id] != 0) {
            const int place = atomicAdd(plan.counts + id, 1);
            list((place >> 16) - 1, place & 0xFFFF, pair);
        }
    }
    // but those of an expert of several clusters, which must agree, are in the order of the pairs.
#pragma unroll 1
    for (int item = thread / 32; item < kNarrowItemsMax; item += kNarrowThreads / 32) {
        const auto [expert, rows, first] = plan.items[item];
        int row = -first;
        // Eight pairs a lane at once.
#pragma unroll 1
        for (int begin = 8 * lane; rows > 0 && first >= 0 && begin - 8 * lane < args.pairs; begin += 8 * 32) {
            const uint4 eight = *reinterpret_cast<const uint4*>(plan.ids + begin);
            const uint32_t words[4] = {eight.x, eight.y, eight.z, eight.w};
            uint32_t matches = 0;
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                const bool match = static_cast<int>(words[i / 2] >> 16 * (i % 2) & 0xFFFF) == expert;
                matches |= static_cast<uint32_t>(match && begin + i < args.pairs) << i;
            }
            int upto = __popc(matches);
#pragma unroll
            for (int offset = 1; offset < 32; offset *= 2) {
                const int before = __shfl_up_sync(0xFFFFFFFFu, upto, offset);
                upto += lane >= offset ? before : 0;
            }
            int at = row + upto - __popc(matches);
            for (; matches != 0; matches &= matches - 1, ++at) {
                if (at >= 0 && at < rows) {
                    list(item, at, begin + __ffs(static_cast<int>(matches)) - 1);
                }
            }
            row += __shfl_sync(0xFFFFFFFFu, upto, 31);
        }
    }
}

}  // namespace tessera::cuda

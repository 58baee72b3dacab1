// The plan of prefill attention: the query tiles of all sequences, those that see the most slots first, so
// that blocks which take the next tile when they are free end at nearly the same time.
//
// One block; a counting sort by the number of KV tiles in shared memory, finer than the tiles' costs differ.
// Tiles of one length come in any order: a tile's bits do not depend on its place.
#include <algorithm>

#include "base/check.h"
#include "device/cuda/cuda_check.h"
#include "ops/attention/cuda/prefill_plan.h"
#include "ops/common/cuda/reduce.cuh"

namespace tessera::cuda {
namespace {

constexpr int kThreads = kPrefillSequences;
constexpr int kPairTiles = 4;           // of an average sequence, from which items are pairs
constexpr int kLengths = 2 * kThreads;  // KV tiles told apart: 262,144 slots; longer ones share the last
static_assert(kThreads / kWarp == kWarp);

// Inclusive sums over the block's threads.
__device__ __forceinline__ int scan_block(int value, int32_t* warps) {
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
    const int warp = static_cast<int>(threadIdx.x) / kWarp;
#pragma unroll
    for (int offset = 1; offset < kWarp; offset *= 2) {
        const int other = __shfl_up_sync(kFullWarp, value, offset);
        value += lane >= offset ? other : 0;
    }
    if (lane == kWarp - 1) {
        warps[warp] = value;
    }
    __syncthreads();
    const int before = warp_reduce(lane < warp ? warps[lane] : 0, Sum{});
    __syncthreads();
    return value + before;
}

// The sequence of tile `tile`: the first whose tiles end after it.
__device__ __forceinline__ int find_sequence(const int32_t* ends, int tile) {
    int sequence = 0;
#pragma unroll
    for (int step = kThreads / 2; step > 0; step /= 2) {
        sequence += ends[sequence + step - 1] <= tile ? step : 0;
    }
    return sequence;
}

struct Place {
    PrefillItem item;
    int length = 0;  // place in the histogram: the longest first
};
__device__ __forceinline__ Place place_of(const PrefillPlanCudaArgs& args, const int32_t* ends, int tile,
                                          int queries) {
    const int sequence = find_sequence(ends, tile);
    const int first = sequence > 0 ? ends[sequence - 1] : 0;
    const int query = (tile - first) * queries;
    PrefillItem item{.row = args.first_rows[sequence] + query, .sequence = sequence};
    item.queries = min(queries, args.first_rows[sequence + 1] - item.row);
    item.first = args.first_slot + args.positions[sequence] + query;
    const int tiles = (item.first + item.queries + kPrefillKvSlots - 1) / kPrefillKvSlots;
    return {item, kLengths - 1 - min(tiles, kLengths - 1)};
}

__global__ void __launch_bounds__(kThreads)
    plan_kernel(PrefillPlanCudaArgs args, PrefillPlan plan, int queries) {
    __shared__ int32_t warps[kWarp];
    __shared__ int32_t ends[kThreads];
    __shared__ int32_t places[kLengths];
    const int thread = static_cast<int>(threadIdx.x);
    int tiles = 0;
    if (thread < args.sequences) {
        tiles = (args.first_rows[thread + 1] - args.first_rows[thread] + queries - 1) / queries;
    }
    ends[thread] = scan_block(tiles, warps);
    places[2 * thread] = 0;
    places[2 * thread + 1] = 0;
    __syncthreads();
    const int count = min(ends[kThreads - 1], static_cast<int>(plan.items_max));
    for (int tile = thread; tile < count; tile += kThreads) {
        atomicAdd(&places[place_of(args, ends, tile, queries).length], 1);
    }
    __syncthreads();
    const int counts[2] = {places[2 * thread], places[2 * thread + 1]};
    const int end = scan_block(counts[0] + counts[1], warps);
    places[2 * thread] = end - counts[0] - counts[1];
    places[2 * thread + 1] = end - counts[1];
    __syncthreads();
    for (int tile = thread; tile < count; tile += kThreads) {
        const Place place = place_of(args, ends, tile, queries);
        plan.items[atomicAdd(&places[place.length], 1)] = place.item;
    }
    if (thread == 0) {
        *plan.count = count;
        *plan.next = 0;
        *plan.finished = 0;
    }
}

}  // namespace

PrefillPlan make_prefill_plan(const PrefillPlanCudaArgs& args) {
    check(args.sequences >= 1 && args.sequences <= kPrefillSequences,
          "attention prefill: 1 to 1024 sequences");
    auto* words = reinterpret_cast<int32_t*>(args.workspace);
    PrefillPlan plan{.count = words, .next = words + 32, .finished = words + 64};
    plan.items = reinterpret_cast<PrefillItem*>(args.workspace + 512);
    const int32_t queries = prefill_cuda_tile_queries(args.shape);
    plan.item_tiles = args.rows_max / args.sequences >= kPairTiles * queries ? 2 : 1;
    plan.items_max = args.rows_max / (queries * plan.item_tiles) + args.sequences;
    const int64_t tiles_max = args.rows_max / queries + args.sequences;
    plan.bytes = 512 + (tiles_max * static_cast<int64_t>(sizeof(PrefillItem)) + 255) / 256 * 256;
    return plan;
}

}  // namespace tessera::cuda

namespace tessera {

int32_t prefill_cuda_tile_queries(const AttentionCudaShape& shape) {
    return cuda::kPrefillRows / (shape.q_heads / shape.kv_heads);
}

int64_t prefill_cuda_workspace_bytes(const AttentionCudaShape& shape, int32_t sequences_max,
                                     int32_t rows_max) {
    return cuda::make_prefill_plan({.sequences = sequences_max, .rows_max = rows_max, .shape = shape}).bytes;
}

void prefill_plan_cuda(cudaStream_t stream, const PrefillPlanCudaArgs& args) {
    const cuda::PrefillPlan plan = cuda::make_prefill_plan(args);
    cuda::plan_kernel<<<1, cuda::kThreads, 0, stream>>>(
        args, plan, prefill_cuda_tile_queries(args.shape) * plan.item_tiles);
    cuda_check_launch();
}

}  // namespace tessera

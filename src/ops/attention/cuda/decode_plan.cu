// The task assignment of decode attention: once a step, for all layers. ops/attention/decode_plan.h has the
// arithmetic.
//
// Roofline: a few kilobytes, and 2 to 9 MB of marks written by all multiprocessors, so a launch and the
// latency of one load, a scan and a search.
#include "base/check.h"
#include "device/cuda/cuda_check.h"
#include "ops/attention/cuda/decode_layout.cuh"

namespace tessera::cuda {
namespace {

constexpr int kThreads = 1024;
constexpr int kMarkBlocks = 64;

// The sum of `value` over the block's threads up to this one.
__device__ __forceinline__ int32_t scan_block(int32_t value, int32_t* warps) {
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
    const int warp = static_cast<int>(threadIdx.x) / kWarp;
    const auto scan_warp = [lane](int32_t x) {
#pragma unroll
        for (int offset = 1; offset < kWarp; offset *= 2) {
            const int32_t other = __shfl_up_sync(kFullWarp, x, offset);
            x += lane >= offset ? other : 0;
        }
        return x;
    };
    const int32_t sum = scan_warp(value);
    if (lane == kWarp - 1) {
        warps[warp] = sum;
    }
    __syncthreads();
    if (warp == 0) {
        warps[lane] = scan_warp(warps[lane]);
    }
    __syncthreads();
    return sum + (warp > 0 ? warps[warp - 1] : 0);
}

// The last i with begins[i] <= at; begins[0] = 0, begins[count] > at.
__device__ __forceinline__ int find(const int32_t* begins, int count, int32_t at) {
    int low = 0;
    int high = count;
    while (high - low > 1) {
        const int middle = (low + high) / 2;
        if (begins[middle] <= at) {
            low = middle;
        } else {
            high = middle;
        }
    }
    return low;
}

// Marks every word of the partial results as not written.
__device__ __forceinline__ void mark_unwritten(const DecodeLayout& layout) {
    const int64_t count = layout.partial_bytes / 16;
    auto* to = reinterpret_cast<uint4*>(layout.partials);
    const int64_t first = (static_cast<int64_t>(blockIdx.x) - 1) * kThreads + threadIdx.x;
    for (int64_t i = first; i < count; i += int64_t{kMarkBlocks} * kThreads) {
        to[i] = make_uint4(kUnwritten, kUnwritten, kUnwritten, kUnwritten);
    }
}

// Block 0 deals, the others prepare the workspace.
__global__ void __launch_bounds__(kThreads) plan_kernel(const __grid_constant__ DecodePlanCudaArgs args,
                                                        const __grid_constant__ DecodeLayout layout) {
    __shared__ int32_t warps[kThreads / kWarp];
    __shared__ int32_t begins[kThreads + 1];
    __shared__ int32_t tiles_of[kThreads];
    const int thread = static_cast<int>(threadIdx.x);
    wait_for_previous_kernel();
    let_next_kernel_start();
    if (blockIdx.x > 0) {
        mark_unwritten(layout);
        return;
    }
    const int position = thread < args.batch ? args.positions[thread] : -1;
    const int tiles = decode_tiles(decode_slots(position, args.q_len, args.first_slot, args.slots_max));
    const int cost = thread < args.batch ? decode_cost(tiles) : 0;
    const int end = scan_block(cost, warps);
    tiles_of[thread] = tiles;
    begins[thread + 1] = end;
    begins[0] = 0;
    __syncthreads();
    const int line = begins[args.batch];
    const int used = decode_bins_used(line, layout.bin_count);
    for (int bin = thread; bin <= layout.bin_count; bin += kThreads) {
        int sequence = 0;
        const auto place_of = [&](int b) -> DecodeBin {
            const auto at = static_cast<int32_t>(decode_cut(line, used, b));
            sequence = at < line ? find(begins, args.batch, at) : args.batch;
            return at < line ? decode_bin_at(sequence, tiles_of[sequence], at - begins[sequence])
                             : DecodeBin{.sequence = sequence};
        };
        DecodeBin place = place_of(bin);
        if (bin < layout.bin_count && place_of(bin + 1).tile > 0) {
            decode_number_pieces({line, used, begins[sequence], begins[sequence + 1]}, bin, place);
        }
        store_bin(layout.bins + bin, place);
    }
}

}  // namespace

DecodeRows make_decode_rows(const DecodePlanCudaArgs& plan) {
    DecodeRows rows;
    rows.group = plan.shape.q_heads / plan.shape.kv_heads;
    rows.all = rows.group * plan.q_len;
    rows.parts = (rows.all + kDecodeRowsMax - 1) / kDecodeRowsMax;
    rows.each = rows.all / rows.parts;
    rows.heads = plan.shape.kv_heads * rows.parts;
    rows.padded = rows.each <= 8 ? 8 : (rows.each <= 16 ? 16 : 32);
    check(rows.group * plan.shape.kv_heads == plan.shape.q_heads && rows.group <= kAttentionCudaGroupMax &&
              plan.q_len >= 1 && plan.q_len <= 4,
          "attention decode: 1 to 16 query heads for each KV head, 1 to 4 queries");
    check(rows.each * rows.parts == rows.all,
          "attention decode: 3 queries of 11, 13 or 15 query heads cannot be halved");
    return rows;
}

DecodeLayout make_decode_layout(const DecodePlanCudaArgs& plan) {
    const DecodeRows rows = make_decode_rows(plan);
    DecodeLayout layout;
    layout.bin_count = decode_cuda_bins(plan);
    check(layout.bin_count >= 1, "attention decode: more KV heads than blocks");
    const auto take = [&](int64_t bytes) {
        std::byte* at = plan.workspace + layout.bytes;
        layout.bytes += (bytes + 255) / 256 * 256;
        return at;
    };
    layout.bins = reinterpret_cast<DecodeBin*>(take((layout.bin_count + 1) * int64_t{sizeof(DecodeBin)}));
    layout.partial_bytes = int64_t{decode_slots_of_plan(layout.bin_count * rows.heads)} * rows.padded *
                           kPartialFloatsOfRow * int64_t{sizeof(float)};
    layout.partials = reinterpret_cast<float*>(take(layout.partial_bytes));
    return layout;
}

}  // namespace tessera::cuda

namespace tessera {

int32_t decode_cuda_bins(const DecodePlanCudaArgs& args) {
    return (args.sm_count * cuda::kDecodeBlocksOfSm - cuda::kDecodeSpareBlocks) /
           cuda::make_decode_rows(args).heads;
}

int64_t decode_cuda_workspace_bytes(const DecodePlanCudaArgs& largest) {
    DecodePlanCudaArgs plan = largest;
    plan.workspace = nullptr;
    return cuda::make_decode_layout(plan).bytes;
}

void decode_plan_cuda(cudaStream_t stream, const DecodePlanCudaArgs& args) {
    check(args.batch >= 1 && args.batch <= cuda::kThreads, "attention decode: 1 to 1024 sequences");
    check(args.sm_count >= 1, "attention decode: needs the device's number of multiprocessors");
    cuda_check(cuda::launch_dependent({dim3(1 + cuda::kMarkBlocks), cuda::kThreads, 0, stream},
                                      cuda::plan_kernel, args, cuda::make_decode_layout(args)));
}

}  // namespace tessera

// The task assignment of decode attention: once a step, for all layers. ops/attention/decode_plan.h has the
// arithmetic.
//
// Roofline: a few kilobytes, so a launch and the latency of one load, a scan and a search.
#include "base/check.h"
#include "device/cuda/cuda_check.h"
#include "ops/attention/cuda/decode_layout.cuh"

namespace tessera::cuda {
namespace {

constexpr int kThreads = 1024;

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

__global__ void __launch_bounds__(kThreads)
    plan_kernel(const __grid_constant__ DecodePlanCudaArgs args, DecodeBin* bins, int heads, int bin_count) {
    __shared__ int32_t warps[kThreads / kWarp];
    __shared__ int32_t begins[kThreads + 1];
    __shared__ int32_t tiles_of[kThreads];
    const int thread = static_cast<int>(threadIdx.x);
    wait_for_previous_kernel();
    let_next_kernel_start();
    const int position = thread < args.batch ? args.positions[thread] : -1;
    const int tiles = decode_tiles(decode_slots(position, args.q_len, args.first_slot, args.slots_max));
    const int cost = thread < args.batch ? heads * decode_item_cost(args.split, tiles) : 0;
    const int end = scan_block(cost, warps);
    tiles_of[thread] = tiles;
    begins[thread + 1] = end;
    begins[0] = 0;
    __syncthreads();
    const int line = begins[args.batch];
    const int used = decode_bins_used(line, bin_count);
    for (int bin = thread; bin <= bin_count; bin += kThreads) {
        int item_begin = 0;
        int item_cost = 0;
        const auto place_of = [&](int b) -> DecodeBin {
            const auto at = static_cast<int32_t>(decode_cut(line, used, b));
            if (at >= line) {
                return {args.batch, 0, 0};
            }
            const int sequence = find(begins, args.batch, at);
            item_cost = decode_item_cost(args.split, tiles_of[sequence]);
            const int inside = at - begins[sequence];
            item_begin = at - inside % item_cost;
            return decode_bin_at(args.split, heads,
                                 {sequence, inside / item_cost, tiles_of[sequence], inside % item_cost});
        };
        DecodeBin place = place_of(bin);
        if (args.split == DecodeSplit::kBalanced && bin < bin_count && place_of(bin + 1).tile > 0) {
            decode_number_pieces({line, used, item_begin, item_begin + item_cost}, bin, place);
        }
        store_bin(bins + bin, place);
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
    check(rows.group * plan.shape.kv_heads == plan.shape.q_heads && rows.group <= 16 && plan.q_len >= 1 &&
              plan.q_len <= 4 && rows.each * rows.parts == rows.all,
          "attention decode: 1 to 16 query heads for each KV head, 1 to 4 queries");
    return rows;
}

DecodeLayout make_decode_layout(const DecodePlanCudaArgs& plan) {
    const DecodeRows rows = make_decode_rows(plan);
    DecodeLayout layout;
    layout.bin_count = decode_cuda_bins(plan);
    const auto take = [&](int64_t bytes) {
        std::byte* at = plan.workspace + layout.bytes;
        layout.bytes += (bytes + 255) / 256 * 256;
        return at;
    };
    layout.bins = reinterpret_cast<DecodeBin*>(take((layout.bin_count + 1) * int64_t{sizeof(DecodeBin)}));
    const int64_t slots =
        decode_slots_of_plan(plan.split, layout.bin_count, int64_t{plan.batch} * rows.heads) * rows.each;
    layout.sums = reinterpret_cast<float*>(take(slots * kHeadDim * 4));
    layout.states = reinterpret_cast<float2*>(take(slots * 8));
    return layout;
}

}  // namespace tessera::cuda

namespace tessera {

int32_t decode_cuda_bins(const DecodePlanCudaArgs& args) {
    return args.sm_count * args.blocks_per_sm;
}

int64_t decode_cuda_workspace_bytes(const DecodePlanCudaArgs& largest) {
    DecodePlanCudaArgs plan = largest;
    plan.workspace = nullptr;
    return cuda::make_decode_layout(plan).bytes;
}

void decode_plan_cuda(cudaStream_t stream, const DecodePlanCudaArgs& args) {
    check(args.batch >= 1 && args.batch <= cuda::kThreads, "attention decode: 1 to 1024 sequences");
    check(args.sm_count >= 1, "attention decode: needs the device's number of multiprocessors");
    const cuda::DecodeLayout layout = cuda::make_decode_layout(args);
    cuda_check(cuda::launch_dependent({dim3(1), cuda::kThreads, 0, stream}, cuda::plan_kernel, args,
                                      layout.bins, cuda::make_decode_rows(args).heads, layout.bin_count));
}

}  // namespace tessera

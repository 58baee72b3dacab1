// The merge of split items: O = sum of O_i 2^(b_i - b) over sum of s_i 2^(b_i - b), pieces in ascending
// order.
//
// Roofline: the partial results, at most 2 a block of the kernel before: about 2 MB, from the L2 cache. What
// counts is the latency of three dependent loads.
#include "device/cuda/cuda_check.h"
#include "ops/attention/cuda/decode_layout.cuh"
#include "ops/common/cuda/convert.cuh"
#include "ops/common/cuda/mma.cuh"

namespace tessera::cuda {
namespace {

constexpr int kWarps = 4;
constexpr int kThreads = kWarps * kWarp;
constexpr int kAhead = 8;   // loads of a lane under way
constexpr int kSlices = 8;  // of the dimensions, for an item of many pieces
constexpr float kLn2 = 0.6931471805599453f;

// A block's part: one row of an item, or 16 dimensions of it.
struct Part {
    int32_t sequence = 0;
    int32_t head = 0;
    int32_t pieces = 0;  // of the item; 0 = nothing to do
    int32_t first = 0;   // slot of the first piece
    int32_t second = 0;  // of the second one; the others follow in steps
    int32_t step = 1;
    int32_t slice = 0;
    int32_t slices = 1;
    __device__ __forceinline__ int32_t slot(int i) const { return i == 0 ? first : second + (i - 1) * step; }
};

__device__ __forceinline__ Part find_part(const DecodeKernelArgs& args, int index) {
    const DecodePlanCudaArgs& plan = args.decode.plan;
    if (plan.split == DecodeSplit::kFixed) {
        const int sequence = index / args.rows.heads;
        const int32_t tiles =
            decode_tiles(decode_slots(plan.positions[sequence], plan.q_len, plan.first_slot, plan.slots_max));
        const int32_t first = index * kDecodeFixedPiecesMax;
        const int32_t count = decode_pieces(plan.split, tiles);
        return {sequence, index % args.rows.heads, count > 1 ? count : 0, first, first + 1};
    }
    // Every bin that the item is cut at could merge it: the first one does alone, or the first eight a slice
    // each.
    const DecodeBin bin = load_bin(args.layout.bins + index);
    const DecodeBin next = load_bin(args.layout.bins + index + 1);
    const int32_t slices = bin.pieces > kSlices ? kSlices : 1;
    const int32_t begin = index - bin.piece;
    return {next.sequence,      next.head,     bin.piece < slices ? bin.pieces : 0,
            2 * begin + 1,      2 * begin + 2, 2,
            bin.piece % slices, slices};
}

// Lanes share a piece's dimensions, four a lane; what remains of a warp, and the warps, share the pieces.
__global__ void __launch_bounds__(kThreads) combine_kernel(const __grid_constant__ DecodeKernelArgs args) {
    __shared__ float4 parts[kThreads];
    __shared__ float sums[kThreads];
    const int thread = static_cast<int>(threadIdx.x);
    const int row = static_cast<int>(blockIdx.y);
    // The plan is older than the kernel before.
    const Part part = find_part(args, static_cast<int>(blockIdx.x));
    // One block stays in any case: who waits for this kernel waits for the one before through it alone.
    if (part.pieces == 0 && (blockIdx.x > 0 || blockIdx.y > 0)) {
        return;
    }
    const auto place = [&](int piece) {
        return static_cast<int64_t>(part.slot(piece)) * args.rows.each + row;
    };
    const int width = kWarp / part.slices;
    const int group = thread / width;
    const int groups = kThreads / width;
    const int dim = part.slice * (kHeadDim / part.slices) + thread % width * 4;
    wait_for_previous_kernel();
    let_next_kernel_start();
    if (part.pieces == 0) {
        return;
    }
    float base = -INFINITY;
    for (int piece = thread % kWarp; piece < part.pieces; piece += kWarp) {
        base = fmaxf(base, args.layout.states[place(piece)].x);
    }
    base = warp_reduce(base, Max{});
    float sum = 0;
    float4 out = make_float4(0, 0, 0, 0);
    for (int piece = group; piece < part.pieces; piece += groups * kAhead) {
        float4 loaded[kAhead];
        float2 states[kAhead];
#pragma unroll
        for (int i = 0; i < kAhead; ++i) {
            const int at = piece + i * groups;
            const bool exists = at < part.pieces;
            states[i] = exists ? args.layout.states[place(at)] : make_float2(-INFINITY, 0);
            loaded[i] = exists
                            ? *reinterpret_cast<const float4*>(args.layout.sums + place(at) * kHeadDim + dim)
                            : make_float4(0, 0, 0, 0);
        }
#pragma unroll
        for (int i = 0; i < kAhead; ++i) {
            const float factor = exp2_fast(states[i].x - base);
            sum = fmaf(states[i].y, factor, sum);
            out.x = fmaf(loaded[i].x, factor, out.x);
            out.y = fmaf(loaded[i].y, factor, out.y);
            out.z = fmaf(loaded[i].z, factor, out.z);
            out.w = fmaf(loaded[i].w, factor, out.w);
        }
    }
    parts[thread] = out;
    sums[thread] = sum;
    __syncthreads();
    if (group > 0) {
        return;
    }
    for (int other = 1; other < groups; ++other) {
        const float4 more = parts[other * width + thread];
        sum += sums[other * width + thread];
        out.x += more.x;
        out.y += more.y;
        out.z += more.z;
        out.w += more.w;
    }
    const int of_head = part.head % args.rows.parts * args.rows.each + row;
    const int64_t token = part.sequence * args.decode.plan.q_len + of_head / args.rows.group;
    const int head = part.head / args.rows.parts * args.rows.group + of_head % args.rows.group;
    const float factor = args.decode.kv.v_scale / sum;
    auto* to =
        static_cast<__nv_bfloat16*>(args.decode.out) + token * args.decode.out_stride + head * kHeadDim + dim;
    *reinterpret_cast<uint2*>(to) =
        make_uint2(pack_bf16(out.x * factor, out.y * factor), pack_bf16(out.z * factor, out.w * factor));
    if (part.slice == 0 && thread == 0 && args.decode.lse != nullptr) {
        args.decode.lse[token * args.decode.plan.shape.q_heads + head] = (base + log2f(sum)) * kLn2;
    }
}

}  // namespace

void launch_decode_combine(cudaStream_t stream, const DecodeKernelArgs& args) {
    const DecodePlanCudaArgs& plan = args.decode.plan;
    const int items =
        plan.split == DecodeSplit::kFixed ? plan.batch * args.rows.heads : args.layout.bin_count;
    const dim3 grid(static_cast<unsigned>(items), static_cast<unsigned>(args.rows.each));
    cuda_check(launch_dependent({grid, kThreads, 0, stream}, combine_kernel, args));
}

}  // namespace tessera::cuda

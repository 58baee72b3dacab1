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
constexpr int kAhead = 8;  // loads of a lane under way
constexpr float kLn2 = 0.6931471805599453f;

// The pieces of one item: the first one's slot, the second one's, and so on in steps.
struct Pieces {
    int32_t sequence = 0;
    int32_t head = 0;
    int32_t count = 0;
    int32_t first = 0;
    int32_t second = 0;
    int32_t step = 1;
    __device__ __forceinline__ int32_t slot(int i) const { return i == 0 ? first : second + (i - 1) * step; }
};

__device__ __forceinline__ Pieces find_pieces(const DecodeKernelArgs& args, int index) {
    const DecodePlanCudaArgs& plan = args.decode.plan;
    if (plan.split == DecodeSplit::kFixed) {
        const int sequence = index / args.rows.heads;
        const int32_t tiles =
            decode_tiles(decode_slots(plan.positions[sequence], plan.q_len, plan.first_slot, plan.slots_max));
        const int32_t first = index * kDecodeFixedPiecesMax;
        const int32_t count = decode_pieces(plan.split, tiles);
        return {sequence, index % args.rows.heads, count > 1 ? count : 0, first, first + 1, 1};
    }
    const int4 bin = *reinterpret_cast<const int4*>(args.layout.bins + index);
    const int4 next = *reinterpret_cast<const int4*>(args.layout.bins + index + 1);
    return {next.x, next.y, bin.w, 2 * index + 1, 2 * index + 2, 2};
}

// One row of an item a block; a warp has every fourth piece, a lane four dimensions.
__global__ void __launch_bounds__(kThreads) combine_kernel(const __grid_constant__ DecodeKernelArgs args) {
    __shared__ float4 parts[kWarps][kWarp];
    __shared__ float part_sums[kWarps];
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
    const int warp = static_cast<int>(threadIdx.x) / kWarp;
    const int row = static_cast<int>(blockIdx.y);
    wait_for_previous_kernel();
    let_next_kernel_start();
    const Pieces pieces = find_pieces(args, static_cast<int>(blockIdx.x));
    if (pieces.count == 0) {
        return;
    }
    const auto place = [&](int piece) {
        return static_cast<int64_t>(pieces.slot(piece)) * args.rows.each + row;
    };
    float base = -INFINITY;
    for (int piece = lane; piece < pieces.count; piece += kWarp) {
        base = fmaxf(base, args.layout.states[place(piece)].x);
    }
    base = warp_reduce(base, Max{});
    float sum = 0;
    float out[4] = {};
    for (int piece = warp; piece < pieces.count; piece += kWarps * kAhead) {
        float4 loaded[kAhead];
        float2 states[kAhead];
#pragma unroll
        for (int i = 0; i < kAhead; ++i) {
            const int at = piece + i * kWarps;
            const bool exists = at < pieces.count;
            states[i] = exists ? args.layout.states[place(at)] : make_float2(-INFINITY, 0);
            loaded[i] =
                exists ? *reinterpret_cast<const float4*>(args.layout.sums + place(at) * kHeadDim + lane * 4)
                       : make_float4(0, 0, 0, 0);
        }
#pragma unroll
        for (int i = 0; i < kAhead; ++i) {
            const float factor = exp2_fast(states[i].x - base);
            sum = fmaf(states[i].y, factor, sum);
            out[0] = fmaf(loaded[i].x, factor, out[0]);
            out[1] = fmaf(loaded[i].y, factor, out[1]);
            out[2] = fmaf(loaded[i].z, factor, out[2]);
            out[3] = fmaf(loaded[i].w, factor, out[3]);
        }
    }
    parts[warp][lane] = make_float4(out[0], out[1], out[2], out[3]);
    part_sums[warp] = sum;
    __syncthreads();
    if (warp > 0) {
        return;
    }
#pragma unroll
    for (int w = 1; w < kWarps; ++w) {
        const float4 other = parts[w][lane];
        sum += part_sums[w];
        out[0] += other.x;
        out[1] += other.y;
        out[2] += other.z;
        out[3] += other.w;
    }
    const int of_head = pieces.head % args.rows.parts * args.rows.each + row;
    const int64_t token = pieces.sequence * args.decode.plan.q_len + of_head / args.rows.group;
    const int head = pieces.head / args.rows.parts * args.rows.group + of_head % args.rows.group;
    const float factor = args.decode.kv.v_scale / sum;
    auto* to =
        static_cast<__nv_bfloat16*>(args.decode.out) + token * args.decode.out_stride + head * kHeadDim;
    *reinterpret_cast<uint2*>(to + lane * 4) =
        make_uint2(pack_bf16(out[0] * factor, out[1] * factor), pack_bf16(out[2] * factor, out[3] * factor));
    if (lane == 0 && args.decode.lse != nullptr) {
        args.decode.lse[token * args.decode.plan.shape.q_heads + head] = (base + log2f(sum)) * kLn2;
    }
}

}  // namespace

void launch_decode_combine(cudaStream_t stream, const DecodeKernelArgs& args) {
    const DecodePlanCudaArgs& plan = args.decode.plan;
    // Balanced: each bin ends at most one item's first piece.
    const int items =
        plan.split == DecodeSplit::kFixed ? plan.batch * args.rows.heads : args.layout.bin_count;
    const dim3 grid(static_cast<unsigned>(items), static_cast<unsigned>(args.rows.each));
    cuda_check(launch_dependent(combine_kernel, grid, kThreads, 0, stream, args));
}

}  // namespace tessera::cuda

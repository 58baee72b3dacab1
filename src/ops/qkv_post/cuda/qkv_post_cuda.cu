#include "base/check.h"
#include "device/cuda/cuda_check.h"
#include "ops/common/cuda/convert.cuh"
#include "ops/common/cuda/reduce.cuh"
#include "ops/qkv_post/cuda/qkv_post_cuda.h"

namespace tessera {
namespace {

using namespace cuda;

constexpr int kThreads = 256;
constexpr int kPageSlots = 64;

// A head in a warp's registers: lane l has the elements 2 (l + 32 i) and the one after it of the first half
// (a) and of the second half (b).
template <int Pairs>
struct Head {
    float2 a[Pairs];
    float2 b[Pairs];
};

__device__ __forceinline__ float2 load_pair(const __nv_bfloat16* from) {
    const uint32_t raw = *reinterpret_cast<const uint32_t*>(from);
    return {low_bf16(raw), high_bf16(raw)};
}

template <int Pairs>
__device__ __forceinline__ Head<Pairs> load_head(const __nv_bfloat16* from, int lane) {
    Head<Pairs> head;
#pragma unroll
    for (int i = 0; i < Pairs; ++i) {
        const int d = 2 * (lane + kWarp * i);
        head.a[i] = load_pair(from + d);
        head.b[i] = load_pair(from + 2 * kWarp * Pairs + d);
    }
    return head;
}

__device__ __forceinline__ float2 norm_pair(float2 x, float scale, float2 weight) {
    return {round_bf16(round_bf16(x.x * scale) * weight.x), round_bf16(round_bf16(x.y * scale) * weight.y)};
}

template <int Pairs>
__device__ __forceinline__ void norm_head(Head<Pairs>& head, const __nv_bfloat16* weight, float eps,
                                          int lane) {
    float squares = 0;
#pragma unroll
    for (int i = 0; i < Pairs; ++i) {
        squares = fmaf(head.a[i].x, head.a[i].x, squares);
        squares = fmaf(head.a[i].y, head.a[i].y, squares);
        squares = fmaf(head.b[i].x, head.b[i].x, squares);
        squares = fmaf(head.b[i].y, head.b[i].y, squares);
    }
    const float mean = warp_reduce(squares, Sum{}) / static_cast<float>(4 * kWarp * Pairs);
    const float scale = rsqrtf(mean + eps);
    const Head<Pairs> w = load_head<Pairs>(weight, lane);
#pragma unroll
    for (int i = 0; i < Pairs; ++i) {
        head.a[i] = norm_pair(head.a[i], scale, w.a[i]);
        head.b[i] = norm_pair(head.b[i], scale, w.b[i]);
    }
}

// `rope` is the position's row of the table: 2 * 32 * Pairs cosines, then the sines.
template <int Pairs>
__device__ __forceinline__ void rotate_head(Head<Pairs>& head, const float* rope, int lane) {
#pragma unroll
    for (int i = 0; i < Pairs; ++i) {
        const int d = 2 * (lane + kWarp * i);
        const float2 cos = *reinterpret_cast<const float2*>(rope + d);
        const float2 sin = *reinterpret_cast<const float2*>(rope + 2 * kWarp * Pairs + d);
        const float2 a = head.a[i];
        const float2 b = head.b[i];
        head.a[i] = {a.x * cos.x - b.x * sin.x, a.y * cos.y - b.y * sin.y};
        head.b[i] = {b.x * cos.x + a.x * sin.x, b.y * cos.y + a.y * sin.y};
    }
}

template <int Pairs>
__device__ __forceinline__ void store_bf16(const Head<Pairs>& head, __nv_bfloat16* to, int lane) {
#pragma unroll
    for (int i = 0; i < Pairs; ++i) {
        const int d = 2 * (lane + kWarp * i);
        *reinterpret_cast<uint32_t*>(to + d) = pack_bf16(head.a[i].x, head.a[i].y);
        *reinterpret_cast<uint32_t*>(to + 2 * kWarp * Pairs + d) = pack_bf16(head.b[i].x, head.b[i].y);
    }
}

__device__ __forceinline__ uint16_t to_e4m3(float2 x, float scale) {
    return pack_e4m3(__fdiv_rn(round_bf16(x.x), scale), __fdiv_rn(round_bf16(x.y), scale));
}

template <int Pairs>
__device__ __forceinline__ void store_e4m3(const Head<Pairs>& head, uint8_t* to, float scale, int lane) {
#pragma unroll
    for (int i = 0; i < Pairs; ++i) {
        const int d = 2 * (lane + kWarp * i);
        *reinterpret_cast<uint16_t*>(to + d) = to_e4m3(head.a[i], scale);
        *reinterpret_cast<uint16_t*>(to + 2 * kWarp * Pairs + d) = to_e4m3(head.b[i], scale);
    }
}

template <int Pairs>
__device__ __forceinline__ void store_kv(const QkvPostCudaArgs& args, const Head<Pairs>& head, int64_t token,
                                         int64_t kv_head, bool is_v) {
    constexpr int64_t kHeadDim = 4 * kWarp * Pairs;
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
    const int32_t place = args.positions[token] + args.slot_shift;
    const int32_t page = args.page_table[args.sequences[token] * args.page_table_stride + place / kPageSlots];
    const int64_t first = (kv_head * kPageSlots + place % kPageSlots) * kHeadDim;
    std::byte* block = args.pages + page * args.page_stride + (is_v ? args.v_offset : args.k_offset);
    if (args.kv_dtype == DType::kFloat8E4M3) {
        store_e4m3(head, reinterpret_cast<uint8_t*>(block) + first, is_v ? args.v_scale : args.k_scale, lane);
    } else {
        store_bf16(head, reinterpret_cast<__nv_bfloat16*>(block) + first, lane);
    }
}

// Roofline: reads q, k and v and writes as much: 4 bytes an element against about 10 operations, so
// bandwidth. A warp makes one head of one token; heads are q's, then k's, then v's.
template <int Pairs>
__global__ void __launch_bounds__(kThreads) qkv_post_kernel(QkvPostCudaArgs args) {
    constexpr int64_t kHeadDim = 4 * kWarp * Pairs;
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
    const int64_t warp = (blockIdx.x * static_cast<int64_t>(kThreads) + threadIdx.x) / kWarp;
    const int64_t heads = args.q_heads + 2 * args.kv_heads;
    const int64_t token = warp / heads;
    int64_t head = warp % heads;
    if (token >= args.tokens || args.positions[token] < 0) {
        return;
    }
    const float* rope = args.rope + args.positions[token] * kHeadDim;
    if (head < args.q_heads) {
        Head<Pairs> q = load_head<Pairs>(args.q + token * args.q_stride + head * kHeadDim, lane);
        if (args.q_norm != nullptr) {
            norm_head(q, args.q_norm, args.eps, lane);
        }
        rotate_head(q, rope, lane);
        store_bf16(q, args.q_out + token * args.q_out_stride + head * kHeadDim, lane);
        return;
    }
    head -= args.q_heads;
    const bool is_v = head >= args.kv_heads;
    head -= is_v ? args.kv_heads : 0;
    const __nv_bfloat16* from = (is_v ? args.v : args.k) + token * args.kv_stride + head * kHeadDim;
    Head<Pairs> kv = load_head<Pairs>(from, lane);
    if (!is_v) {
        if (args.k_norm != nullptr) {
            norm_head(kv, args.k_norm, args.eps, lane);
        }
        rotate_head(kv, rope, lane);
    }
    store_kv(args, kv, token, head, is_v);
}

template <int Pairs>
void launch(cudaStream_t stream, const QkvPostCudaArgs& args) {
    const int64_t threads = args.tokens * (args.q_heads + 2 * args.kv_heads) * kWarp;
    qkv_post_kernel<Pairs>
        <<<static_cast<unsigned>((threads + kThreads - 1) / kThreads), kThreads, 0, stream>>>(args);
    cuda_check_launch();
}

}  // namespace

void qkv_post_cuda(cudaStream_t stream, const QkvPostCudaArgs& args) {
    check(args.kv_dtype == DType::kBFloat16 || args.kv_dtype == DType::kFloat8E4M3,
          "qkv_post: kv_dtype must be bfloat16 or fp8_e4m3");
    check((args.q_stride | args.kv_stride | args.q_out_stride | args.k_offset | args.v_offset) % 2 == 0,
          "qkv_post: strides and offsets must be even");
    if (args.tokens == 0) {
        return;
    }
    switch (args.head_dim) {
        case 128:
            return launch<1>(stream, args);
        case 256:
            return launch<2>(stream, args);
        default:
            check(false, "qkv_post: head_dim must be 128 or 256");
    }
}

}  // namespace tessera

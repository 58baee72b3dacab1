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

// A head in the registers of Lanes = head_dim / 8 neighbouring lanes: lane l has the elements 4 l .. 4 l + 3
// of the first half (a) and of the second half (b).
struct Head {
    float4 a;
    float4 b;
};

__device__ __forceinline__ float4 load_quad(const __nv_bfloat16* from) {
    const uint2 raw = *reinterpret_cast<const uint2*>(from);
    return {low_bf16(raw.x), high_bf16(raw.x), low_bf16(raw.y), high_bf16(raw.y)};
}

template <int Lanes>
__device__ __forceinline__ Head load_head(const __nv_bfloat16* from, int lane) {
    return {load_quad(from + 4 * lane), load_quad(from + 4 * Lanes + 4 * lane)};
}

__device__ __forceinline__ float squares(float4 x) {
    return fmaf(x.x, x.x, fmaf(x.y, x.y, fmaf(x.z, x.z, x.w * x.w)));
}

__device__ __forceinline__ float4 norm_quad(float4 x, float scale, float4 weight) {
    return {round_bf16(round_bf16(x.x * scale) * weight.x), round_bf16(round_bf16(x.y * scale) * weight.y),
            round_bf16(round_bf16(x.z * scale) * weight.z), round_bf16(round_bf16(x.w * scale) * weight.w)};
}

// `rope` is the position's row of the table: 4 * Lanes cosines, then the sines.
template <int Lanes>
__device__ __forceinline__ Head rotate(Head head, const float* rope, int lane) {
    const float4 cos = *reinterpret_cast<const float4*>(rope + 4 * lane);
    const float4 sin = *reinterpret_cast<const float4*>(rope + 4 * Lanes + 4 * lane);
    const float4 a = head.a;
    const float4 b = head.b;
    return {{a.x * cos.x - b.x * sin.x, a.y * cos.y - b.y * sin.y, a.z * cos.z - b.z * sin.z,
             a.w * cos.w - b.w * sin.w},
            {b.x * cos.x + a.x * sin.x, b.y * cos.y + a.y * sin.y, b.z * cos.z + a.z * sin.z,
             b.w * cos.w + a.w * sin.w}};
}

__device__ __forceinline__ void store_quad(float4 x, __nv_bfloat16* to) {
    *reinterpret_cast<uint2*>(to) = make_uint2(pack_bf16(x.x, x.y), pack_bf16(x.z, x.w));
}

__device__ __forceinline__ void store_quad_e4m3(float4 x, float scale, uint8_t* to) {
    *reinterpret_cast<uint32_t*>(to) =
        pack_e4m3x4(__fdiv_rn(round_bf16(x.x), scale), __fdiv_rn(round_bf16(x.y), scale),
                    __fdiv_rn(round_bf16(x.z), scale), __fdiv_rn(round_bf16(x.w), scale));
}

// One head of the input: q's heads first, then k's, then v's.
struct Work {
    int64_t token = 0;
    int64_t head = 0;  // among q's, k's or v's
    bool is_q = false;
    bool is_v = false;
};

template <int Lanes>
__device__ __forceinline__ void store_kv(const QkvPostCudaArgs& args, const Head& head, const Work& work,
                                         int lane) {
    const int32_t place = args.positions[work.token] + args.slot_shift;
    const int32_t page =
        args.page_table[args.sequences[work.token] * args.page_table_stride + place / kPageSlots];
    const int64_t first = (work.head * kPageSlots + place % kPageSlots) * 8 * Lanes + 4 * lane;
    std::byte* block = args.pages + page * args.page_stride + (work.is_v ? args.v_offset : args.k_offset);
    if (args.kv_dtype == DType::kFloat8E4M3) {
        const float scale = work.is_v ? args.v_scale : args.k_scale;
        store_quad_e4m3(head.a, scale, reinterpret_cast<uint8_t*>(block) + first);
        store_quad_e4m3(head.b, scale, reinterpret_cast<uint8_t*>(block) + first + 4 * Lanes);
    } else {
        store_quad(head.a, reinterpret_cast<__nv_bfloat16*>(block) + first);
        store_quad(head.b, reinterpret_cast<__nv_bfloat16*>(block) + first + 4 * Lanes);
    }
}

// Roofline: reads q, k and v and writes as much: 4 bytes an element against about 10 operations, so
// bandwidth. Lanes neighbouring lanes make one head of one token.
template <int Lanes>
__global__ void __launch_bounds__(kThreads) qkv_post_kernel(QkvPostCudaArgs args) {
    constexpr int kHeadDim = 8 * Lanes;
    const int lane = static_cast<int>(threadIdx.x) % Lanes;
    const int64_t index = (blockIdx.x * static_cast<int64_t>(kThreads) + threadIdx.x) / Lanes;
    const int64_t heads = args.q_heads + 2 * args.kv_heads;
    Work work{index / heads, index % heads};
    const bool active = work.token < args.tokens && args.positions[work.token] >= 0;
    work.is_q = work.head < args.q_heads;
    work.is_v = work.head >= args.q_heads + args.kv_heads;
    const __nv_bfloat16* norm = work.is_v ? nullptr : (work.is_q ? args.q_norm : args.k_norm);
    const __nv_bfloat16* from = work.is_q ? args.q + work.token * args.q_stride
                                          : (work.is_v ? args.v : args.k) + work.token * args.kv_stride;
    work.head -= work.is_q ? 0 : args.q_heads + (work.is_v ? args.kv_heads : 0);

    Head head{};
    if (active) {
        head = load_head<Lanes>(from + work.head * kHeadDim, lane);
    }
    // All lanes of the warp take part, whatever their heads need.
    const float sum = warp_reduce<Lanes>(squares(head.a) + squares(head.b), Sum{});
    if (!active) {
        return;
    }
    if (norm != nullptr) {
        const float scale = rsqrtf(sum / static_cast<float>(kHeadDim) + args.eps);
        const Head weight = load_head<Lanes>(norm, lane);
        head = {norm_quad(head.a, scale, weight.a), norm_quad(head.b, scale, weight.b)};
    }
    if (!work.is_v) {
        head = rotate<Lanes>(head, args.rope + args.positions[work.token] * static_cast<int64_t>(kHeadDim),
                             lane);
    }
    if (!work.is_q) {
        return store_kv<Lanes>(args, head, work, lane);
    }
    __nv_bfloat16* to = args.q_out + work.token * args.q_out_stride + work.head * kHeadDim + 4 * lane;
    store_quad(head.a, to);
    store_quad(head.b, to + 4 * Lanes);
}

template <int Lanes>
void launch(cudaStream_t stream, const QkvPostCudaArgs& args) {
    const int64_t threads = args.tokens * (args.q_heads + 2 * args.kv_heads) * Lanes;
    qkv_post_kernel<Lanes>
        <<<static_cast<unsigned>((threads + kThreads - 1) / kThreads), kThreads, 0, stream>>>(args);
    cuda_check_launch();
}

}  // namespace

void qkv_post_cuda(cudaStream_t stream, const QkvPostCudaArgs& args) {
    check(args.kv_dtype == DType::kBFloat16 || args.kv_dtype == DType::kFloat8E4M3,
          "qkv_post: kv_dtype must be bfloat16 or fp8_e4m3");
    check((args.q_stride | args.kv_stride | args.q_out_stride) % 4 == 0 &&
              (args.page_stride | args.k_offset | args.v_offset) % 8 == 0,
          "qkv_post: strides must be multiples of 4 elements, pages and their offsets of 8 bytes");
    if (args.tokens == 0) {
        return;
    }
    switch (args.head_dim) {
        case 64:
            return launch<8>(stream, args);
        case 128:
            return launch<16>(stream, args);
        case 256:
            return launch<32>(stream, args);
        default:
            check(false, "qkv_post: head_dim must be 64, 128 or 256");
    }
}

}  // namespace tessera

#include "base/check.h"
#include "device/cuda/cuda_check.h"
#include "ops/common/cuda/convert.cuh"
#include "ops/common/cuda/dependent_launch.cuh"
#include "ops/common/cuda/reduce.cuh"
#include "ops/qkv_post/cuda/qkv_post_cuda.h"

namespace tessera {
namespace cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kPageSlots = 64;
constexpr int kFewTokens = 264;
constexpr float kE4m3Max = 448;

struct PostArgs : QkvPostCudaArgs {
    float k_scale_inverse = 1;
    float v_scale_inverse = 1;
};

// A head in the registers of Lanes = head_dim / 8 neighbouring lanes: lane l has the elements 4 l .. 4 l + 3
// of the first half and of the second half.
struct Head {
    float v[8];
};
struct RawHead {
    uint2 a;
    uint2 b;
};
template <int Lanes>
__device__ __forceinline__ RawHead load_head(const __nv_bfloat16* from, int lane) {
    return {*reinterpret_cast<const uint2*>(from + 4 * lane),
            *reinterpret_cast<const uint2*>(from + 4 * Lanes + 4 * lane)};
}
__device__ __forceinline__ Head unpack(const RawHead& raw) {
    Head head;
    unpack_bf16x8({raw.a.x, raw.a.y, raw.b.x, raw.b.y}, head.v);
    return head;
}
template <int Lanes>
__device__ __forceinline__ void store_head(const Head& head, __nv_bfloat16* to, int lane) {
    const uint4 packed = pack_bf16x8(head.v);
    *reinterpret_cast<uint2*>(to + 4 * lane) = make_uint2(packed.x, packed.y);
    *reinterpret_cast<uint2*>(to + 4 * Lanes + 4 * lane) = make_uint2(packed.z, packed.w);
}
template <int Lanes>
__device__ __forceinline__ void store_head(const Head& head, const Divider& divide, uint8_t* to, int lane) {
    float q[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        q[i] = divide(round_bf16(head.v[i]));
    }
    *reinterpret_cast<uint32_t*>(to + 4 * lane) = pack_e4m3x4(q[0], q[1], q[2], q[3]);
    *reinterpret_cast<uint32_t*>(to + 4 * Lanes + 4 * lane) = pack_e4m3x4(q[4], q[5], q[6], q[7]);
}

// All lanes of the warp take part.
template <int Lanes>
__device__ __forceinline__ float inverse_norm(const Head& head, float eps) {
    float sum = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        sum = fmaf(head.v[i], head.v[i], sum);
    }
    return rsqrtf(warp_reduce<Lanes>(sum, Sum{}) / static_cast<float>(8 * Lanes) + eps);
}
__device__ __forceinline__ void apply_norm(Head& head, float scale, const RawHead& weight) {
    const Head w = unpack(weight);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        head.v[i] = round_bf16(round_bf16(head.v[i] * scale) * w.v[i]);
    }
}

// A position's angles: cosines in v[0 .. 3], sines in v[4 .. 7].
template <int Lanes>
__device__ __forceinline__ Head load_angles(const float* rope, int lane) {
    const float4 cos = *reinterpret_cast<const float4*>(rope + 4 * lane);
    const float4 sin = *reinterpret_cast<const float4*>(rope + 4 * Lanes + 4 * lane);
    return {{cos.x, cos.y, cos.z, cos.w, sin.x, sin.y, sin.z, sin.w}};
}
__device__ __forceinline__ void rotate(Head& head, const Head& angles) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const float a = head.v[i];
        const float b = head.v[i + 4];
        head.v[i] = a * angles.v[i] - b * angles.v[i + 4];
        head.v[i + 4] = b * angles.v[i] + a * angles.v[i + 4];
    }
}
__device__ __forceinline__ void round_head(Head& head) {
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        head.v[i] = round_bf16(head.v[i]);
    }
}

// The orthonormal Hadamard matrix: element i's bit 6 and its bits 1 and 0 lie in a lane, the others among the
// lanes. All lanes of the warp take part.
template <int Lanes>
__device__ __forceinline__ void hadamard(Head& head, int lane) {
#pragma unroll
    for (int bit = 1; bit < 8; bit *= 2) {
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            if ((i & bit) == 0) {
                const float a = head.v[i];
                const float b = head.v[i + bit];
                head.v[i] = a + b;
                head.v[i + bit] = a - b;
            }
        }
    }
#pragma unroll
    for (int bit = 1; bit < Lanes; bit *= 2) {
        const float sign = (lane & bit) != 0 ? -1.0f : 1.0f;
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            head.v[i] = fmaf(sign, head.v[i], __shfl_xor_sync(kFullWarp, head.v[i], bit));
        }
    }
    constexpr float kScale = 0.08838834764831845f;  // 1 / sqrt(128)
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        head.v[i] = round_bf16(head.v[i] * kScale);
    }
}

template <int Lanes>
__device__ __forceinline__ float head_scale(const Head& head) {
    float largest = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        largest = fmaxf(largest, fabsf(round_bf16(head.v[i])));
    }
    return fmaxf(warp_reduce<Lanes>(largest, Max{}), 1e-20f) / kE4m3Max;
}

// What the heads of one token share.
struct Token {
    int64_t index = 0;
    int slot = 0;  // in its page
    std::byte* page = nullptr;
};

__device__ __forceinline__ Token find_token(const PostArgs& args, int64_t index, int32_t position) {
    const int32_t place = position + args.slot_shift;
    const int32_t page = args.page_table[args.sequences[index] * args.page_table_stride + place / kPageSlots];
    return {index, place % kPageSlots, args.pages + page * args.page_stride};
}

// A finished head.
struct Stored {
    Head value;
    int head = 0;  // among q's, k's or v's
    bool is_v = false;
    float scale = 0;  // the head's own, with options
};

// The scale of a stored K or V head; the options may ask for others than one for all.
template <bool Options>
__device__ __forceinline__ Divider kv_divider(const PostArgs& args, const Token& token, const Stored& result,
                                              int lane) {
    if constexpr (Options) {
        if (result.is_v && args.v_head_scale != nullptr) {
            return divider(args.v_head_scale[result.head]);
        }
        if (!result.is_v && args.k_scale_offset >= 0) {
            if (lane == 0) {
                auto* scales = reinterpret_cast<float*>(token.page + args.k_scale_offset);
                scales[result.head * kPageSlots + token.slot] = result.scale;
            }
            return divider(result.scale);
        }
    }
    return result.is_v ? Divider{args.v_scale, args.v_scale_inverse}
                       : Divider{args.k_scale, args.k_scale_inverse};
}

template <int Lanes, bool Options>
__device__ __forceinline__ void store_kv(const PostArgs& args, const Token& token, const Stored& result,
                                         int lane) {
    const int64_t first = (result.head * kPageSlots + token.slot) * (8 * Lanes);
    std::byte* block = token.page + (result.is_v ? args.v_offset : args.k_offset);
    if (args.kv_dtype == DType::kFloat8E4M3) {
        const Divider divide = kv_divider<Options>(args, token, result, lane);
        store_head<Lanes>(result.value, divide, reinterpret_cast<uint8_t*>(block) + first, lane);
    } else {
        store_head<Lanes>(result.value, reinterpret_cast<__nv_bfloat16*>(block) + first, lane);
    }
}

template <int Lanes, bool Options>
__device__ __forceinline__ void store_q(const PostArgs& args, const Token& token, const Stored& result,
                                        int lane) {
    const int64_t place = result.head * 8 * Lanes;
    if constexpr (Options) {
        if (args.q8 != nullptr) {
            if (lane == 0) {
                args.q8_scale[token.index * args.q_heads + result.head] = result.scale;
            }
            return store_head<Lanes>(result.value, divider(result.scale),
                                     args.q8 + token.index * args.q8_stride + place, lane);
        }
    }
    store_head<Lanes>(result.value, args.q_out + token.index * args.q_out_stride + place, lane);
}

// Roofline: reads q, k and v and writes as much: 3 to 4 bytes an element against about 20 operations, so
// bandwidth. Lanes neighbouring lanes make one head; a block makes kThreads / Lanes * Heads heads of one
// token, all of whose loads are under way at once.
template <int Lanes, int Heads, bool Options>
__global__ void __launch_bounds__(kThreads) qkv_post_kernel(const __grid_constant__ PostArgs args) {
    constexpr int kGroups = kThreads / Lanes;
    constexpr int kHeadDim = 8 * Lanes;
    const int lane = static_cast<int>(threadIdx.x) % Lanes;
    const int q_heads = static_cast<int>(args.q_heads);
    const int kv_heads = static_cast<int>(args.kv_heads);
    const int first = static_cast<int>(blockIdx.y) * kGroups * Heads + static_cast<int>(threadIdx.x) / Lanes;
    const RawHead q_norm = args.q_norm == nullptr ? RawHead{} : load_head<Lanes>(args.q_norm, lane);
    const RawHead k_norm = args.k_norm == nullptr ? RawHead{} : load_head<Lanes>(args.k_norm, lane);
    let_next_kernel_start();
    wait_for_previous_kernel();
    const int64_t index = blockIdx.x;
    const int32_t position = args.positions[index];
    RawHead raw[Heads];
#pragma unroll
    for (int i = 0; i < Heads; ++i) {
        const int head = first + i * kGroups;
        const __nv_bfloat16* from =
            head < q_heads ? args.q + index * args.q_stride + head * kHeadDim
                           : (head < q_heads + kv_heads
                                  ? args.k + index * args.kv_stride + (head - q_heads) * kHeadDim
                                  : args.v + index * args.kv_stride + (head - q_heads - kv_heads) * kHeadDim);
        raw[i] = head < q_heads + 2 * kv_heads ? load_head<Lanes>(from, lane) : RawHead{};
    }
    if (position < 0) {
        return;
    }
    const Head angles = load_angles<Lanes>(args.rope + position * static_cast<int64_t>(kHeadDim), lane);
    const Token token = find_token(args, index, position);
#pragma unroll
    for (int i = 0; i < Heads; ++i) {
        const int head = first + i * kGroups;
        const bool is_q = head < q_heads;
        const bool is_v = head >= q_heads + kv_heads;
        const bool has_norm = !is_v && (is_q ? args.q_norm : args.k_norm) != nullptr;
        Head value = unpack(raw[i]);
        float own = 0;
        if (Options && args.norm_after_rope) {
            if (!is_v) {
                rotate(value, angles);
                round_head(value);
            }
        }
        const float scale = inverse_norm<Lanes>(value, args.eps);
        if (has_norm) {
            apply_norm(value, scale, is_q ? q_norm : k_norm);
        }
        if (!is_v && !(Options && args.norm_after_rope)) {
            rotate(value, angles);
        }
        if constexpr (Options) {
            if (args.hadamard) {
                Head turned = value;
                round_head(turned);
                hadamard<Lanes>(turned, lane);
                value = is_v ? value : turned;
            }
            own = head_scale<Lanes>(value);
        }
        const int first_kv = is_v ? q_heads + kv_heads : q_heads;
        const Stored result{value, is_q ? head : head - first_kv, is_v, own};
        if (is_q) {
            store_q<Lanes, Options>(args, token, result, lane);
        } else if (head < q_heads + 2 * kv_heads) {
            store_kv<Lanes, Options>(args, token, result, lane);
        }
    }
}

template <int Lanes, int Heads, bool Options>
void launch(cudaStream_t stream, const PostArgs& args) {
    constexpr int kBlockHeads = kThreads / Lanes * Heads;
    const dim3 grid(
        static_cast<unsigned>(args.tokens),
        static_cast<unsigned>((args.q_heads + 2 * args.kv_heads + kBlockHeads - 1) / kBlockHeads));
    cuda_check(launch_dependent({grid, kThreads, 0, stream}, qkv_post_kernel<Lanes, Heads, Options>, args));
}

// Few tokens: as many blocks as possible share the latency of one. Many: a token's angles and its place are
// found once for most of its heads.
template <int Lanes, bool Options>
void launch_heads(cudaStream_t stream, const PostArgs& args) {
    const int64_t each = (args.q_heads + 2 * args.kv_heads + kThreads / Lanes - 1) / (kThreads / Lanes);
    const int heads = args.tokens <= kFewTokens || each == 1 ? 1 : (each <= 3 ? 3 : 5);
    if (heads == 1) {
        launch<Lanes, 1, Options>(stream, args);
    } else if (heads == 3) {
        launch<Lanes, 3, Options>(stream, args);
    } else {
        launch<Lanes, 5, Options>(stream, args);
    }
}

template <int Lanes>
void launch_options(cudaStream_t stream, const QkvPostCudaArgs& given) {
    const PostArgs args{given, 1 / given.k_scale, 1 / given.v_scale};
    const bool options = args.v_head_scale != nullptr || args.k_scale_offset >= 0 || args.norm_after_rope ||
                         args.hadamard || args.q8 != nullptr;
    if (options) {
        launch_heads<Lanes, true>(stream, args);
    } else {
        launch_heads<Lanes, false>(stream, args);
    }
}

}  // namespace
}  // namespace cuda

void qkv_post_cuda(cudaStream_t stream, const QkvPostCudaArgs& args) {
    check(args.kv_dtype == DType::kBFloat16 || args.kv_dtype == DType::kFloat8E4M3,
          "qkv_post: kv_dtype must be bfloat16 or fp8_e4m3");
    check((args.q_stride | args.kv_stride | args.q_out_stride | args.q8_stride) % 4 == 0 &&
              (args.page_stride | args.k_offset | args.v_offset) % 8 == 0,
          "qkv_post: strides must be multiples of 4 elements, pages and their offsets of 8 bytes");
    check(!args.hadamard || args.head_dim == 128, "qkv_post: the Hadamard matrix is that of head_dim 128");
    if (args.tokens == 0) {
        return;
    }
    switch (args.head_dim) {
        case 64:
            return cuda::launch_options<8>(stream, args);
        case 128:
            return cuda::launch_options<16>(stream, args);
        case 256:
            return cuda::launch_options<32>(stream, args);
        default:
            check(false, "qkv_post: head_dim must be 64, 128 or 256");
    }
}

}  // namespace tessera

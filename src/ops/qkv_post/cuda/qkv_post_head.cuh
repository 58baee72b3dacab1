// Heads in registers: norm, rotation, Hadamard, rounding, and where they go.
#pragma once

#include "ops/common/cuda/convert.cuh"
#include "ops/common/cuda/reduce.cuh"
#include "ops/qkv_post/cuda/qkv_post_cuda.h"

namespace tessera::cuda {

inline constexpr int kPostThreads = 256;  // that make heads, of a block
inline constexpr int kPageSlots = 64;

struct PostArgs : QkvPostCudaArgs {
    float k_scale_inverse = 1;
    float v_scale_inverse = 1;
};

// A head in the registers of Lanes = head_dim / 8 neighbouring lanes: lane l has the elements 4 l .. 4 l + 3
// of the first half and of the second half. Raw: as bfloat16.
struct Head {
    float v[8];
};
using RawHead = uint4;

template <int Lanes>
__device__ __forceinline__ RawHead load_head(const __nv_bfloat16* from, int lane) {
    const uint2 a = *reinterpret_cast<const uint2*>(from + 4 * lane);
    const uint2 b = *reinterpret_cast<const uint2*>(from + 4 * Lanes + 4 * lane);
    return {a.x, a.y, b.x, b.y};
}
template <int Lanes>
__device__ __forceinline__ void store_head(const RawHead& head, __nv_bfloat16* to, int lane) {
    *reinterpret_cast<uint2*>(to + 4 * lane) = make_uint2(head.x, head.y);
    *reinterpret_cast<uint2*>(to + 4 * Lanes + 4 * lane) = make_uint2(head.z, head.w);
}
template <int Lanes>
__device__ __forceinline__ void store_head(const RawHead& head, const Divider& divide, uint8_t* to,
                                           int lane) {
    float q[8];
    unpack_bf16x8(head, q);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        q[i] = divide(q[i]);
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
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        head.v[i] *= scale;
    }
    unpack_bf16x8(multiply_bf16x8(pack_bf16x8(head.v), weight), head.v);
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
        head.v[i] *= kScale;
    }
}

template <int Lanes>
__device__ __forceinline__ float head_scale(const RawHead& head) {
    constexpr float kE4m3Max = 448;
    float v[8];
    unpack_bf16x8(head, v);
    float largest = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        largest = fmaxf(largest, fabsf(v[i]));
    }
    return fmaxf(warp_reduce<Lanes>(largest, Max{}), 1e-20f) / kE4m3Max;
}

// What the heads of one token share.
struct Token {
    int64_t index = 0;
    int slot = 0;  // in its page
    std::byte* page = nullptr;
    Head angles{};
};

template <int Lanes>
__device__ __forceinline__ Token find_token(const PostArgs& args, int64_t index, int32_t position) {
    const int32_t place = position + args.slot_shift;
    const int32_t page = args.page_table[args.sequences[index] * args.page_table_stride + place / kPageSlots];
    return {index, place % kPageSlots, args.pages + page * args.page_stride,
            load_angles<Lanes>(args.rope + position * static_cast<int64_t>(8 * Lanes),
                               static_cast<int>(threadIdx.x) % Lanes)};
}

// A finished head.
struct Stored {
    RawHead value;
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

// Heads are counted from q's first to v's last. All lanes of the warp take part; those of heads beyond the
// last store nothing.
template <int Lanes, bool Options>
__device__ __forceinline__ void make_head(const PostArgs& args, const Token& token, int head,
                                          const RawHead& norm, const RawHead& raw) {
    const int lane = static_cast<int>(threadIdx.x) % Lanes;
    const int q_heads = static_cast<int>(args.q_heads);
    const int kv_heads = static_cast<int>(args.kv_heads);
    const bool is_q = head < q_heads;
    const bool is_v = head >= q_heads + kv_heads;
    const bool has_norm = !is_v && (is_q ? args.q_norm : args.k_norm) != nullptr;
    const bool late_norm = Options && args.norm_after_rope;
    Head value;
    unpack_bf16x8(raw, value.v);
    if (late_norm) {
        rotate(value, token.angles);
        unpack_bf16x8(pack_bf16x8(value.v), value.v);
    }
    const float scale = inverse_norm<Lanes>(value, args.eps);
    if (has_norm) {
        apply_norm(value, scale, norm);
    }
    if (!late_norm) {
        rotate(value, token.angles);
    }
    Stored stored{pack_bf16x8(value.v), is_q ? head : head - q_heads - (is_v ? kv_heads : 0), is_v};
    if constexpr (Options) {
        if (args.hadamard) {
            unpack_bf16x8(stored.value, value.v);
            hadamard<Lanes>(value, lane);
            stored.value = pack_bf16x8(value.v);
        }
    }
    if (is_v) {
        stored.value = raw;
    }
    if constexpr (Options) {
        stored.scale = head_scale<Lanes>(stored.value);
    }
    if (is_q) {
        store_q<Lanes, Options>(args, token, stored, lane);
    } else if (head < q_heads + 2 * kv_heads) {
        store_kv<Lanes, Options>(args, token, stored, lane);
    }
}

}  // namespace tessera::cuda

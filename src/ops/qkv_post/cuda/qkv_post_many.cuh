// Many tokens: what limits is the number of instructions, so a thread makes the same head of one token after
// the other, and has 16 elements of it; where they come from and go to is computed once.
#pragma once

#include <algorithm>

#include "device/cuda/cuda_check.h"
#include "ops/common/cuda/ask_ahead.cuh"
#include "ops/common/cuda/dependent_launch.cuh"
#include "ops/common/cuda/mma.cuh"
#include "ops/qkv_post/cuda/qkv_post_head.cuh"

namespace tessera::cuda {

inline constexpr int kManyThreads = 320;  // of a block at most
inline constexpr int kMultiprocessors = 132;

inline constexpr int kManyBlocks = 3;  // of a multiprocessor: what the registers allow

struct ManyArgs : PostArgs {
    int heads = 1;  // of a block, for each of its tokens: whole warps
    int tokens_at_once = 1;
};

// The lane of place p has the elements 8 p .. 8 p + 7 of the first half (v[0 .. 7]) and of the second.
struct WideHead {
    float v[16];
};
struct WideRaw {
    uint4 a, b;
};
__device__ __forceinline__ void unpack(const WideRaw& raw, WideHead& head) {
    unpack_bf16x8(raw.a, reinterpret_cast<float(&)[8]>(head.v[0]));
    unpack_bf16x8(raw.b, reinterpret_cast<float(&)[8]>(head.v[8]));
}
__device__ __forceinline__ WideRaw pack(const WideHead& head) {
    return {pack_bf16x8(reinterpret_cast<const float(&)[8]>(head.v[0])),
            pack_bf16x8(reinterpret_cast<const float(&)[8]>(head.v[8]))};
}

template <int Lanes>
__device__ __forceinline__ WideRaw
load_wide(const __nv_bfloat16* from) {  // from this lane's first element on
    return {*reinterpret_cast<const uint4*>(from), *reinterpret_cast<const uint4*>(from + 8 * Lanes)};
}

// Of half of a lane's pairs: cosines in v[0 .. 3], sines in v[4 .. 7]. from: its first cosine.
template <int Lanes>
__device__ __forceinline__ Head load_half_angles(const float* from) {
    const float4 cos = *reinterpret_cast<const float4*>(from);
    const float4 sin = *reinterpret_cast<const float4*>(from + 8 * Lanes);
    return {{cos.x, cos.y, cos.z, cos.w, sin.x, sin.y, sin.z, sin.w}};
}
template <int First>
__device__ __forceinline__ void rotate(WideHead& head, const Head& angles) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const float a = head.v[First + i];
        const float b = head.v[First + i + 8];
        head.v[First + i] = a * angles.v[i] - b * angles.v[i + 4];
        head.v[First + i + 8] = b * angles.v[i] + a * angles.v[i + 4];
    }
}
// All lanes of the warp take part.
template <int Lanes>
__device__ __forceinline__ float inverse_norm(const WideHead& head, float eps) {
    float sum[2] = {};
#pragma unroll
    for (int i = 0; i < 16; ++i) {
        sum[i % 2] = fmaf(head.v[i], head.v[i], sum[i % 2]);
    }
    return rsqrtf(warp_reduce<Lanes>(sum[0] + sum[1], Sum{}) / static_cast<float>(16 * Lanes) + eps);
}
__device__ __forceinline__ void apply_norm(WideHead& head, float scale, const WideRaw& weight) {
#pragma unroll
    for (float& value : head.v) {
        value *= scale;
    }
    const WideRaw scaled = pack(head);
    unpack({multiply_bf16x8(scaled.a, weight.a), multiply_bf16x8(scaled.b, weight.b)}, head);
}

// Where a thread's head goes. A head of q or, in a page, of K or V.
struct ManyTarget {
    int64_t offset =
        0;         // bytes to this lane's first element: of the token's row of q, or of the slot's place
    int head = 0;  // among q's, k's or v's
    bool is_q = false;
    bool is_v = false;
    bool exists = false;
};
template <int Lanes>
__device__ __forceinline__ ManyTarget find_target(const PostArgs& args, int head, int place) {
    const int q_heads = static_cast<int>(args.q_heads);
    const int kv_heads = static_cast<int>(args.kv_heads);
    ManyTarget to;
    to.is_q = head < q_heads;
    to.is_v = head >= q_heads + kv_heads;
    to.exists = head < q_heads + 2 * kv_heads;
    to.head = to.is_q ? head : head - q_heads - (to.is_v ? kv_heads : 0);
    const int bytes = !to.is_q && args.kv_dtype == DType::kFloat8E4M3 ? 1 : 2;
    const int in_head = 8 * place * bytes;
    const int head_bytes = 16 * Lanes * bytes;
    to.offset = in_head + (to.is_q ? to.head * head_bytes
                                   : to.head * kPageSlots * head_bytes +
                                         static_cast<int>(to.is_v ? args.v_offset : args.k_offset));
    return to;
}

template <int Lanes>
__device__ __forceinline__ void store_wide(const WideHead& head, std::byte* to) {
    const WideRaw raw = pack(head);
    *reinterpret_cast<uint4*>(to) = raw.a;
    *reinterpret_cast<uint4*>(to + 16 * Lanes) = raw.b;
}
template <int Lanes>
__device__ __forceinline__ void store_wide(const WideHead& head, const Divider& divide, std::byte* to) {
    uint32_t codes[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        codes[i] = pack_e4m3x4(divide(head.v[4 * i]), divide(head.v[4 * i + 1]), divide(head.v[4 * i + 2]),
                               divide(head.v[4 * i + 3]));
    }
    *reinterpret_cast<uint2*>(to) = make_uint2(codes[0], codes[1]);
    *reinterpret_cast<uint2*>(to + 8 * Lanes) = make_uint2(codes[2], codes[3]);
}

struct ManyToken {
    int index = 0;
    int slot = -1;  // in its page; < 0: padding, nothing is written
    std::byte* page = nullptr;
};

// Stores a finished head, rounded to bfloat16.
template <int Lanes>
__device__ __forceinline__ void store_many(const PostArgs& args, const ManyTarget& to, const WideHead& head,
                                           const ManyToken& token) {
    if (!to.exists || token.slot < 0) {
        return;
    }
    if (to.is_q) {
        store_wide<Lanes>(
            head, reinterpret_cast<std::byte*>(args.q_out + token.index * args.q_out_stride) + to.offset);
        return;
    }
    if (args.kv_dtype != DType::kFloat8E4M3) {
        store_wide<Lanes>(head, token.page + to.offset + token.slot * (32 * Lanes));
        return;
    }
    const Divider divide =
        to.is_v ? Divider{args.v_scale, args.v_scale_inverse} : Divider{args.k_scale, args.k_scale_inverse};
    store_wide<Lanes>(head, divide, token.page + to.offset + token.slot * (16 * Lanes));
}

// What has to be known of a token before the rest can be loaded. position < 0: padding.
struct ManyPlace {
    int32_t position = -1;
    int32_t sequence = 0;
};
__device__ __forceinline__ ManyPlace load_place(const PostArgs& args, int token) {
    return token < args.tokens ? ManyPlace{args.positions[token], args.sequences[token]} : ManyPlace{};
}

template <int Lanes>
__global__ void __launch_bounds__(kManyThreads, kManyBlocks)
    qkv_post_many_kernel(const __grid_constant__ ManyArgs args) {
    const int flat = static_cast<int>(threadIdx.x) / Lanes;
    const int head = static_cast<int>(blockIdx.y) * args.heads + flat % args.heads;
    const int place = static_cast<int>(threadIdx.x) % Lanes;
    const ManyTarget in = find_target<Lanes>(args, head, place);
    const bool has_norm = !in.is_v && (in.is_q ? args.q_norm : args.k_norm) != nullptr;
    const __nv_bfloat16* base = in.is_q ? args.q : in.is_v ? args.v : args.k;
    base += in.head * 16 * Lanes + 8 * place;
    const auto stride = static_cast<int>(in.is_q ? args.q_stride : args.kv_stride);
    const int step = static_cast<int>(gridDim.x) * args.tokens_at_once;
    const int first = static_cast<int>(blockIdx.x) * args.tokens_at_once;
    int token = first + flat / args.heads;
    if (in.exists && token < args.tokens) {
        if (place % 8 == 0) {
            ask_ahead(base + int64_t{token} * stride);
            ask_ahead(base + int64_t{token} * stride + 8 * Lanes);
        } else if (place == 1) {
            ask_ahead(args.positions + token);
            ask_ahead(args.sequences + token);
        }
    }
    wait_for_previous_kernel();
    let_next_kernel_start();
    const auto load = [&](int token) {
        return in.exists && token < args.tokens ? load_wide<Lanes>(base + int64_t{token} * stride)
                                                : WideRaw{};
    };
    WideRaw raw = load(token);
    ManyPlace at = load_place(args, token);
    for (int of_block = first; of_block < args.tokens; of_block += step, token += step) {
        const int position = max(at.position, 0);
        const int64_t spot = position + args.slot_shift;
        const int sequence = at.position < 0 ? 0 : at.sequence;  // padding has none
        const int32_t page_id = args.page_table[sequence * args.page_table_stride + spot / kPageSlots];
        const float* turn = args.rope + position * int64_t{16 * Lanes} + 8 * place;
        const Head angles = load_half_angles<Lanes>(turn);
        const WideRaw raw_next = load(token + step);
        const ManyPlace at_next = load_place(args, token + step);
        WideHead value;
        unpack(raw, value);
        const float scale = inverse_norm<Lanes>(value, args.eps);
        if (has_norm) {
            apply_norm(value, scale, load_wide<Lanes>((in.is_q ? args.q_norm : args.k_norm) + 8 * place));
        }
        if (!in.is_v) {
            rotate<0>(value, angles);
            rotate<4>(value, load_half_angles<Lanes>(turn + 4));
            unpack(pack(value), value);
        }
        const ManyToken of{token, at.position < 0 ? -1 : static_cast<int>(spot % kPageSlots),
                           args.pages + page_id * args.page_stride};
        store_many<Lanes>(args, in, value, of);
        raw = raw_next;
        at = at_next;
    }
}

// False where there are too few tokens.
template <int Lanes>
bool launch_many(cudaStream_t stream, const PostArgs& post) {
    constexpr int64_t kOfWarp = kWarp / Lanes;
    const int64_t all = (post.q_heads + 2 * post.kv_heads + kOfWarp - 1) / kOfWarp * kOfWarp;
    const int64_t pieces = (all * Lanes + kManyThreads - 1) / kManyThreads;
    ManyArgs args{post};
    args.heads = static_cast<int>((all / kOfWarp + pieces - 1) / pieces * kOfWarp);
    args.tokens_at_once = std::max(1, kManyThreads / (args.heads * Lanes));
    const int64_t blocks = kManyBlocks * kMultiprocessors / pieces;
    if (post.tokens < blocks * args.tokens_at_once) {
        return false;
    }
    const dim3 grid(static_cast<unsigned>(blocks), static_cast<unsigned>(pieces));
    cuda_check(launch_dependent({grid, args.heads * args.tokens_at_once * Lanes, 0, stream},
                                qkv_post_many_kernel<Lanes>, args));
    return true;
}

}  // namespace tessera::cuda

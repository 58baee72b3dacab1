// Many tokens: what limits is the number of instructions, so a thread makes the same head of one token after
// the other, and has 16 elements of it; where they come from and go to is computed once.
#pragma once

#include <algorithm>

#include "device/cuda/cuda_check.h"
#include "ops/common/cuda/dependent_launch.cuh"
#include "ops/common/cuda/mma.cuh"
#include "ops/qkv_post/cuda/qkv_post_head.cuh"

namespace tessera::cuda {

inline constexpr int kManyThreads = 320;  // of a block at most
inline constexpr int kMultiprocessors = 132;

enum class ManyOptions { kNone, kScales, kHadamard };  // the last with scales as well

// Blocks of a multiprocessor: what the registers allow.
constexpr int many_blocks(ManyOptions options) {
    return options == ManyOptions::kHadamard ? 2 : 3;
}

struct ManyArgs : PostArgs {
    int heads = 1;  // of a block, for each of its tokens: whole warps
    int tokens_at_once = 1;
};

// The lane of place p has the elements 8 p .. 8 p + 7 of the first half (v[0 .. 7]) and of the second. Whole:
// 16 p .. 16 p + 15.
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

// The orthonormal Hadamard matrix of 128 for the four heads of a warp. It is a sum of signs for each of the
// seven bits of an element's number. A product with the matrix of 16 on the tensor cores, whose factors are
// exact, takes bits 0, 4, 5 and 6; it moves bit 3 into the lane, where bits 1 and 2 lie, and the heads to
// other lanes: the result lies as Whole, in place hadamard_place() of head hadamard_head() of the four. Its
// input lies in many_place().
__device__ __forceinline__ int hadamard_head(int lane) {
    return lane & 3;
}
__device__ __forceinline__ int hadamard_place(int lane) {
    return (lane >> 3 & 3) | (lane & 4);
}
template <int Lanes, ManyOptions Options>
__device__ __forceinline__ int many_place(int lane) {
    if constexpr (Options == ManyOptions::kHadamard) {
        return (lane >> 2 & 1) | (lane & 3) << 1;  // lane's bits 2, 0, 1 are the element's 3, 4, 5
    }
    return lane % Lanes;
}
// The part of the matrix of 16 that a lane keeps: row lane / 4, columns 2 (lane % 4) and the next.
__device__ __forceinline__ uint32_t hadamard_signs(int lane) {
    const int row = lane / 4;
    const int column = 2 * (lane % 4);
    const auto minus = [&](int c) { return static_cast<uint32_t>(__popc(row & c) & 1); };
    return 0x3F803F80u | minus(column) << 15 | minus(column + 1) << 31;
}
__device__ __forceinline__ void hadamard(WideHead& head, uint32_t signs) {
    const uint32_t matrix[4] = {signs, signs, signs, signs ^ 0x80008000u};
    float sum[4][4] = {};  // of bits 1 and 2
#pragma unroll
    for (int m = 0; m < 4; ++m) {
        mma_16x8<false>(sum[m], matrix, pack_bf16(head.v[2 * m], head.v[2 * m + 8]),
                        pack_bf16(head.v[2 * m + 1], head.v[2 * m + 9]));
    }
    constexpr float kScale = 0.08838834764831845f;  // 1 / sqrt(128)
#pragma unroll
    for (int bit0 = 0; bit0 < 2; ++bit0) {
        float x[8];  // bits 1, 2, 3
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            x[i] = sum[i % 4][2 * bit0 + i / 4];
        }
#pragma unroll
        for (int bit = 1; bit < 8; bit *= 2) {
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                if ((i & bit) == 0) {
                    const float a = x[i];
                    x[i] = a + x[i + bit];
                    x[i + bit] = a - x[i + bit];
                }
            }
        }
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            head.v[bit0 + 2 * i] = x[i] * kScale;
        }
    }
}

// The scale of a head that has one of its own.
template <int Lanes, bool Whole>
__device__ __forceinline__ float head_scale(const WideHead& head) {
    constexpr float kE4m3Max = 448;
    float largest = 0;
#pragma unroll
    for (const float value : head.v) {
        largest = fmaxf(largest, fabsf(value));
    }
    if constexpr (Whole) {
#pragma unroll
        for (const int bit : {4, 8, 16}) {
            largest = fmaxf(largest, __shfl_xor_sync(kFullWarp, largest, bit));
        }
    } else {
        largest = warp_reduce<Lanes>(largest, Max{});
    }
    return fmaxf(largest, 1e-20f) / kE4m3Max;
}

// Where a thread's head goes. A head of q or, in a page, of K or V.
struct ManyTarget {
    int64_t offset =
        0;         // bytes to this lane's first element: of the token's row of q, or of the slot's place
    int head = 0;  // among q's, k's or v's
    bool is_q = false;
    bool is_v = false;
    bool exists = false;
    bool first_lane = false;
};
template <int Lanes, bool Whole>
__device__ __forceinline__ ManyTarget find_target(const PostArgs& args, int head, int place) {
    const int q_heads = static_cast<int>(args.q_heads);
    const int kv_heads = static_cast<int>(args.kv_heads);
    ManyTarget to{.first_lane = place == 0};
    to.is_q = head < q_heads;
    to.is_v = head >= q_heads + kv_heads;
    to.exists = head < q_heads + 2 * kv_heads;
    to.head = to.is_q ? head : head - q_heads - (to.is_v ? kv_heads : 0);
    const int bytes = (to.is_q ? args.q8 != nullptr : args.kv_dtype == DType::kFloat8E4M3) ? 1 : 2;
    const int in_head = (Whole ? 16 : 8) * place * bytes;
    const int head_bytes = 16 * Lanes * bytes;
    to.offset = in_head + (to.is_q ? to.head * head_bytes
                                   : to.head * kPageSlots * head_bytes +
                                         static_cast<int>(to.is_v ? args.v_offset : args.k_offset));
    return to;
}

template <int Lanes, bool Whole>
__device__ __forceinline__ void store_wide(const WideHead& head, std::byte* to) {
    const WideRaw raw = pack(head);
    *reinterpret_cast<uint4*>(to) = raw.a;
    *reinterpret_cast<uint4*>(to + (Whole ? 16 : 16 * Lanes)) = raw.b;
}
template <int Lanes, bool Whole>
__device__ __forceinline__ void store_wide(const WideHead& head, const Divider& divide, std::byte* to) {
    uint32_t codes[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        codes[i] = pack_e4m3x4(divide(head.v[4 * i]), divide(head.v[4 * i + 1]), divide(head.v[4 * i + 2]),
                               divide(head.v[4 * i + 3]));
    }
    if constexpr (Whole) {
        *reinterpret_cast<uint4*>(to) = make_uint4(codes[0], codes[1], codes[2], codes[3]);
    } else {
        *reinterpret_cast<uint2*>(to) = make_uint2(codes[0], codes[1]);
        *reinterpret_cast<uint2*>(to + 8 * Lanes) = make_uint2(codes[2], codes[3]);
    }
}

struct ManyToken {
    int index = 0;
    int slot = -1;  // in its page; < 0: padding, nothing is written
    std::byte* page = nullptr;
};

// Stores a finished head, rounded to bfloat16.
template <int Lanes, ManyOptions Options, bool Whole>
__device__ __forceinline__ void store_many(const PostArgs& args, const ManyTarget& to, const WideHead& head,
                                           const ManyToken& token) {
    float scale = 0;
    if constexpr (Options != ManyOptions::kNone) {
        if (!(Options == ManyOptions::kHadamard && !Whole)) {
            scale = head_scale<Lanes, Whole>(head);
        }
    }
    if (!to.exists || token.slot < 0) {
        return;
    }
    if (to.is_q) {
        if constexpr (Options != ManyOptions::kNone) {
            if (args.q8 != nullptr) {
                if (to.first_lane) {
                    args.q8_scale[token.index * args.q_heads + to.head] = scale;
                }
                store_wide<Lanes, Whole>(
                    head, divider(scale),
                    reinterpret_cast<std::byte*>(args.q8) + token.index * args.q8_stride + to.offset);
                return;
            }
        }
        store_wide<Lanes, Whole>(
            head, reinterpret_cast<std::byte*>(args.q_out + token.index * args.q_out_stride) + to.offset);
        return;
    }
    if (args.kv_dtype != DType::kFloat8E4M3) {
        store_wide<Lanes, Whole>(head, token.page + to.offset + token.slot * (32 * Lanes));
        return;
    }
    Divider divide =
        to.is_v ? Divider{args.v_scale, args.v_scale_inverse} : Divider{args.k_scale, args.k_scale_inverse};
    if constexpr (Options != ManyOptions::kNone) {
        if (to.is_v && args.v_head_scale != nullptr) {
            divide = divider(args.v_head_scale[to.head]);
        } else if (!to.is_v && args.k_scale_offset >= 0) {
            divide = divider(scale);
            if (to.first_lane) {
                reinterpret_cast<float*>(token.page +
                                         args.k_scale_offset)[to.head * kPageSlots + token.slot] = scale;
            }
        }
    }
    store_wide<Lanes, Whole>(head, divide, token.page + to.offset + token.slot * (16 * Lanes));
}

// What has to be known of a token before the rest can be loaded. position < 0: padding.
struct ManyPlace {
    int32_t position = -1;
    int32_t sequence = 0;
};
__device__ __forceinline__ ManyPlace load_place(const PostArgs& args, int token) {
    return token < args.tokens ? ManyPlace{args.positions[token], args.sequences[token]} : ManyPlace{};
}

template <int Lanes, ManyOptions Options>
__global__ void __launch_bounds__(kManyThreads, many_blocks(Options))
    qkv_post_many_kernel(const __grid_constant__ ManyArgs args) {
    constexpr bool kWhole = Options == ManyOptions::kHadamard;
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
    const int flat = static_cast<int>(threadIdx.x) / Lanes;
    const int head = static_cast<int>(blockIdx.y) * args.heads + flat % args.heads;
    const int place = many_place<Lanes, Options>(lane);
    const ManyTarget in = find_target<Lanes, false>(args, head, place);  // where it goes as it came
    ManyTarget out = in;
    if constexpr (kWhole) {
        out = find_target<Lanes, true>(args, head - lane / Lanes + hadamard_head(lane), hadamard_place(lane));
        out.exists = out.exists && !out.is_v;
    }
    const bool has_norm = !in.is_v && (in.is_q ? args.q_norm : args.k_norm) != nullptr;
    const __nv_bfloat16* base = in.is_q ? args.q : in.is_v ? args.v : args.k;
    base += in.head * 16 * Lanes + 8 * place;
    const auto stride = static_cast<int>(in.is_q ? args.q_stride : args.kv_stride);
    const uint32_t signs = hadamard_signs(lane);
    wait_for_previous_kernel();
    let_next_kernel_start();
    const auto load = [&](int token) {
        return in.exists && token < args.tokens ? load_wide<Lanes>(base + int64_t{token} * stride)
                                                : WideRaw{};
    };
    const int step = static_cast<int>(gridDim.x) * args.tokens_at_once;
    int token = static_cast<int>(blockIdx.x) * args.tokens_at_once + flat / args.heads;
    const int first = static_cast<int>(blockIdx.x) * args.tokens_at_once;
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
        if constexpr (kWhole) {
            if (in.is_v) {
                store_many<Lanes, Options, false>(args, in, value, of);
            }
            hadamard(value, signs);
            unpack(pack(value), value);
        }
        store_many<Lanes, Options, kWhole>(args, out, value, of);
        raw = raw_next;
        at = at_next;
    }
}

// False where there are too few tokens.
template <int Lanes, ManyOptions Options>
bool launch_many(cudaStream_t stream, const PostArgs& post) {
    constexpr int64_t kOfWarp = kWarp / Lanes;
    const int64_t all = (post.q_heads + 2 * post.kv_heads + kOfWarp - 1) / kOfWarp * kOfWarp;
    const int64_t pieces = (all * Lanes + kManyThreads - 1) / kManyThreads;
    ManyArgs args{post};
    args.heads = static_cast<int>((all / kOfWarp + pieces - 1) / pieces * kOfWarp);
    args.tokens_at_once = std::max(1, kManyThreads / (args.heads * Lanes));
    const int64_t blocks = many_blocks(Options) * kMultiprocessors / pieces;
    if (post.tokens < blocks * args.tokens_at_once) {
        return false;
    }
    const dim3 grid(static_cast<unsigned>(blocks), static_cast<unsigned>(pieces));
    cuda_check(launch_dependent({grid, args.heads * args.tokens_at_once * Lanes, 0, stream},
                                qkv_post_many_kernel<Lanes, Options>, args));
    return true;
}

// False where there are too few tokens, or this does not do what is asked for. Lanes of a head.
template <int Lanes>
bool launch_many(cudaStream_t stream, const PostArgs& post) {
    uintptr_t places = 0;
    for (const void* place : {static_cast<const void*>(post.q), static_cast<const void*>(post.k),
                              static_cast<const void*>(post.v), static_cast<const void*>(post.q_out),
                              static_cast<const void*>(post.q8), static_cast<const void*>(post.pages),
                              static_cast<const void*>(post.q_norm), static_cast<const void*>(post.k_norm)}) {
        places |= reinterpret_cast<uintptr_t>(place);
    }
    const bool aligned = places % 16 == 0 && (post.q_stride | post.kv_stride | post.q_out_stride) % 8 == 0 &&
                         post.q8_stride % 16 == 0 &&
                         (post.page_stride | post.k_offset | post.v_offset) % 16 == 0 &&
                         post.page_stride < int64_t{1} << 31;
    if (post.norm_after_rope || !aligned) {
        return false;
    }
    if constexpr (Lanes == 8) {
        if (post.hadamard) {
            return launch_many<Lanes, ManyOptions::kHadamard>(stream, post);
        }
    }
    if (post.v_head_scale != nullptr || post.k_scale_offset >= 0 || post.q8 != nullptr) {
        return launch_many<Lanes, ManyOptions::kScales>(stream, post);
    }
    return launch_many<Lanes, ManyOptions::kNone>(stream, post);
}

}  // namespace tessera::cuda

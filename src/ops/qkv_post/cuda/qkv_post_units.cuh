// Many tokens with scales of their own or the Hadamard matrix: what limits beside memory is the number of
// instructions. A warp takes a unit after the other: as many heads of one token as it has lanes for with 32
// elements each. Units lie in a row, those of a token beside each other, and each warp has an equal piece of
// the row: what a token's units share, the angles too, is found once.
#pragma once

#include <algorithm>

#include "device/cuda/cuda_check.h"
#include "ops/common/cuda/ask_ahead.cuh"
#include "ops/common/cuda/dependent_launch.cuh"
#include "ops/common/cuda/mma.cuh"
#include "ops/qkv_post/cuda/qkv_post_many.cuh"

namespace tessera::cuda {

inline constexpr int kUnitThreads = 128;  // of a block
inline constexpr int kUnitBlocks = 4;     // of a multiprocessor: what the registers allow

struct UnitArgs : PostArgs {
    int units = 1;     // of a token
    int qk_units = 1;  // of these the first, with heads of q and k; the rest has heads of v
};

// Of a head the lane of place p has four pieces of 8 elements, a quarter of the head apart, from 8 p on: both
// of each RoPE pair.
struct LaneRaw {
    uint4 piece[4];
};
struct LaneHead {
    float v[4][8];
};
template <int Lanes>
__device__ __forceinline__ LaneRaw load_lane(const __nv_bfloat16* from) {
    LaneRaw raw;
#pragma unroll
    for (int p = 0; p < 4; ++p) {
        raw.piece[p] = *reinterpret_cast<const uint4*>(from + p * 8 * Lanes);
    }
    return raw;
}
__device__ __forceinline__ void unpack(const LaneRaw& raw, LaneHead& head) {
#pragma unroll
    for (int p = 0; p < 4; ++p) {
        unpack_bf16x8(raw.piece[p], head.v[p]);
    }
}

template <int Lanes>
__device__ __forceinline__ float inverse_norm(const LaneHead& head, float eps) {
    float sum[4] = {};
#pragma unroll
    for (int i = 0; i < 8; ++i) {
#pragma unroll
        for (int p = 0; p < 4; ++p) {
            sum[p] = fmaf(head.v[p][i], head.v[p][i], sum[p]);
        }
    }
    const float all = warp_reduce<Lanes>((sum[0] + sum[1]) + (sum[2] + sum[3]), Sum{});
    return rsqrtf(all / static_cast<float>(32 * Lanes) + eps);
}
__device__ __forceinline__ void apply_norm(LaneHead& head, float scale, const LaneRaw& weight) {
#pragma unroll
    for (int p = 0; p < 4; ++p) {
#pragma unroll
        for (float& value : head.v[p]) {
            value *= scale;
        }
        unpack_bf16x8(multiply_bf16x8(pack_bf16x8(head.v[p]), weight.piece[p]), head.v[p]);
    }
}

struct LaneAngles {
    float cos[2][8], sin[2][8];
};
template <int Lanes>
__device__ __forceinline__ void load_angles(const float* from, LaneAngles& angles) {
#pragma unroll
    for (int p = 0; p < 2; ++p) {
#pragma unroll
        for (int i = 0; i < 8; i += 4) {
            const float* at = from + p * 8 * Lanes + i;
            *reinterpret_cast<float4*>(&angles.cos[p][i]) = *reinterpret_cast<const float4*>(at);
            *reinterpret_cast<float4*>(&angles.sin[p][i]) = *reinterpret_cast<const float4*>(at + 16 * Lanes);
        }
    }
}
__device__ __forceinline__ void rotate(LaneHead& head, const LaneAngles& angles) {
#pragma unroll
    for (int p = 0; p < 2; ++p) {
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            const float a = head.v[p][i];
            const float b = head.v[p + 2][i];
            head.v[p][i] = a * angles.cos[p][i] - b * angles.sin[p][i];
            head.v[p + 2][i] = b * angles.cos[p][i] + a * angles.sin[p][i];
        }
    }
}

// The orthonormal Hadamard matrix of 128, for the eight heads of a warp at once: products with signs, exact
// but for the sums. The matrix is one of 16 x 16 in 8 x 8 blocks of either sign: an element's bits 0 to 2
// choose the block, the others a place in it. Lane l has of head l / 4 the elements whose bits 3 and 4 are l
// % 4; afterwards, of heads 2 (l % 4) and the next, those whose bits 3, 4 and 6 are l / 4.
struct HadamardSigns {
    uint32_t plus[4], minus[4];
};
__device__ __forceinline__ HadamardSigns hadamard_signs(int lane) {
    const auto ends = static_cast<uint32_t>(__popc(lane / 4 & lane % 4 & 3) & 1) * 0x80008000u;
    const uint32_t base = 0x3F803F80u ^ ends;
    const uint32_t flip = (lane & 16) != 0 ? 0x80008000u : 0u;  // bit 6 of both
    HadamardSigns signs;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        signs.plus[i] = base ^ (i >= 2 ? flip : 0u) ^ (i % 2 == 1 ? 0x80000000u : 0u);
        signs.minus[i] = signs.plus[i] ^ 0x80008000u;
    }
    return signs;
}
// sums[i]: of elements whose lowest bits are i. Bit 5 clear, first and second head; bit 5 set, the same. An
// element's bit 2 is no part of the products: a sum and a difference of two results cost less than twice as
// many products.
__device__ __forceinline__ void hadamard(const LaneHead& head, const HadamardSigns& signs,
                                         float (&sums)[8][4]) {
    constexpr float kScale = 0.08838834764831845f;  // 1 / sqrt(128)
#pragma unroll
    for (int i = 0; i < 8; ++i) {
#pragma unroll
        for (float& sum : sums[i]) {
            sum = 0;
        }
    }
#pragma unroll
    for (int j = 0; j < 8; ++j) {
        const uint32_t low = pack_bf16(head.v[0][j], head.v[1][j]);
        const uint32_t high = pack_bf16(head.v[2][j], head.v[3][j]);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int odd = ((i & j) >> 1 ^ (i & j)) & 1;
            mma_16x8<false>(sums[j / 4 * 4 + i], odd != 0 ? signs.minus : signs.plus, low, high);
        }
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
#pragma unroll
        for (int n = 0; n < 4; ++n) {
            const float second = sums[i + 4][n] * kScale;
            sums[i + 4][n] = fmaf(sums[i][n], kScale, -second);
            sums[i][n] = fmaf(sums[i][n], kScale, second);
        }
    }
}

// Pieces of 8 elements, rounded to bfloat16, of one head in a lane.
template <int Pieces>
struct LanePieces {
    uint4 piece[Pieces];
};
// Of two pairs; the signs mean nothing.
__device__ __forceinline__ uint32_t larger_magnitude(uint32_t a, uint32_t b) {
    uint32_t larger;
    asm("max.xorsign.abs.bf16x2 %0, %1, %2;" : "=r"(larger) : "r"(a), "r"(b));
    return larger;
}
// The largest magnitude of a head, which lies in the lanes whose numbers differ in bits of Others only.
template <int Others, int Pieces>
__device__ __forceinline__ float largest_of_head(const LanePieces<Pieces>& head) {
    uint32_t of_piece[Pieces];
#pragma unroll
    for (int p = 0; p < Pieces; ++p) {
        const uint4& piece = head.piece[p];
        of_piece[p] =
            larger_magnitude(larger_magnitude(piece.x, piece.y), larger_magnitude(piece.z, piece.w));
    }
    uint32_t largest = of_piece[0];
#pragma unroll
    for (int p = 1; p < Pieces; ++p) {
        largest = larger_magnitude(largest, of_piece[p]);
    }
    float of_lane = fmaxf(fabsf(low_bf16(largest)), fabsf(high_bf16(largest)));
#pragma unroll
    for (int bit = 1; bit < kWarp; bit *= 2) {
        if ((Others & bit) != 0) {
            of_lane = fmaxf(of_lane, __shfl_xor_sync(kFullWarp, of_lane, bit));
        }
    }
    return fmaxf(of_lane, 1e-20f);
}

// Apart: elements from one piece to the next.
template <int Apart, int Pieces>
__device__ __forceinline__ void store_pieces(const LanePieces<Pieces>& head, std::byte* to) {
#pragma unroll
    for (int p = 0; p < Pieces; ++p) {
        *reinterpret_cast<uint4*>(to + p * 2 * Apart) = head.piece[p];
    }
}
template <int Apart, int Pieces, typename Scaled>
__device__ __forceinline__ void store_pieces(const LanePieces<Pieces>& head, const Scaled& scaled,
                                             std::byte* to) {
#pragma unroll
    for (int p = 0; p < Pieces; ++p) {
        float v[8];
        unpack_bf16x8(head.piece[p], v);
#pragma unroll
        for (float& value : v) {
            value = scaled(value);
        }
        *reinterpret_cast<uint2*>(to + p * Apart) =
            make_uint2(pack_e4m3x4(v[0], v[1], v[2], v[3]), pack_e4m3x4(v[4], v[5], v[6], v[7]));
    }
}

// A head's own scale. The quotient by it is one product, within two units of its last place.
inline constexpr float kE4m3Max = 448;
struct OwnScale {
    float scale;
    float inverse;

    __device__ __forceinline__ float operator()(float value) const { return value * inverse; }
};
__device__ __forceinline__ OwnScale own_scale(float largest) {
    const float scale = Divider{kE4m3Max, 1 / kE4m3Max}(largest);
    float rough;
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(rough) : "f"(scale));  // neither is subnormal
    return {scale, fmaf(fmaf(-scale, rough, 1.0f), rough, rough)};
}

// Where a lane's pieces go.
struct ManyPieces {
    int head = 0;
    int first = 0;  // element of the head
};

template <int Lanes, bool Hadamard>
struct Units {
    static constexpr int kHeadDim = 32 * Lanes;
    static constexpr int kHeads = kWarp / Lanes;  // of a unit

    const UnitArgs& args;
    HadamardSigns signs{};
    // The token in work.
    int index = 0;
    int slot = -1;  // in its page; < 0: padding, nothing is written
    int page_id = 0;
    LaneAngles angles{};

    __device__ static int lane() { return static_cast<int>(threadIdx.x) % kWarp; }
    __device__ static int place() { return lane() % Lanes; }
    __device__ int q_heads() const { return static_cast<int>(args.q_heads); }
    __device__ int kv_heads() const { return static_cast<int>(args.kv_heads); }
    // Both are numbers of 32 bits and not negative.
    __device__ static uint64_t wide(int number, int64_t stride) {
        return uint64_t{static_cast<uint32_t>(number)} * static_cast<uint32_t>(stride);
    }

    __device__ __forceinline__ void set_token(int number, const ManyPlace& at) {
        const int position = max(at.position, 0);
        const int spot = position + args.slot_shift;
        const int sequence = at.position < 0 ? 0 : at.sequence;  // padding has none
        load_angles<Lanes>(args.rope + wide(position, kHeadDim) + 8 * place(), angles);
        index = number;
        slot = at.position < 0 ? -1 : spot % kPageSlots;
        page_id = args.page_table[sequence * args.page_table_stride + spot / kPageSlots];
    }

    // A unit's head of this lane.
    struct Place {
        const __nv_bfloat16* from = nullptr;
        bool exists = true;
    };
    __device__ __forceinline__ Place find(int number, int unit) const {
        int head = unit * kHeads + lane() / Lanes;
        const __nv_bfloat16* from = args.q + wide(number, args.q_stride);
        bool exists = true;
        if ((unit + 1) * kHeads > q_heads()) {
            if (unit >= args.qk_units) {
                head -= args.qk_units * kHeads;
                from = args.v + wide(number, args.kv_stride);
                exists = head < kv_heads();
            } else if (head >= q_heads()) {
                head -= q_heads();
                from = args.k + wide(number, args.kv_stride);
                exists = head < kv_heads();
            }
        }
        return {from + static_cast<uint32_t>(head * kHeadDim), exists};
    }
    // A unit as it came; nothing where there is no head.
    __device__ __forceinline__ LaneRaw load(int number, int unit) const {
        const Place head = find(number, unit);
        return head.exists ? load_lane<Lanes>(head.from + 8 * place()) : LaneRaw{};
    }
    // Asks for what the first unit needs.
    __device__ __forceinline__ void ask(int number, int unit) const {
        constexpr int kOfLine = 64;
        const Place head = find(number, unit);
        if (head.exists && place() * kOfLine < kHeadDim) {
            ask_ahead(head.from + place() * kOfLine);
        }
        if (lane() < 2) {
            ask_ahead((lane() == 0 ? args.positions : args.sequences) + number);
        }
    }
    // value: the unit's elements as they came.
    __device__ __forceinline__ void make(int unit, LaneHead& value) const {
        if (unit >= args.qk_units) {
            store_v((unit - args.qk_units) * kHeads + lane() / Lanes, value);
            return;
        }
        const int first_head = unit * kHeads;
        const int head = first_head + lane() / Lanes;
        const __nv_bfloat16* weights = head < q_heads() ? args.q_norm : args.k_norm;
        const float scale = inverse_norm<Lanes>(value, args.eps);
        apply_norm(value, scale, load_lane<Lanes>(weights + 8 * place()));
        rotate(value, angles);
        if constexpr (Hadamard) {
            finish_hadamard(first_head, value);
        } else {
            LanePieces<4> out;
#pragma unroll
            for (int p = 0; p < 4; ++p) {
                out.piece[p] = pack_bf16x8(value.v[p]);
            }
            store_qk<8 * Lanes>({head, 8 * place()}, out, largest_if_used<Lanes - 1>(out));
        }
    }

    template <int Others, int Pieces>
    __device__ __forceinline__ float largest_if_used(const LanePieces<Pieces>& head) const {
        return args.q8 != nullptr || args.k_scale_offset >= 0 ? largest_of_head<Others>(head) : 0.0f;
    }
    __device__ __forceinline__ void finish_hadamard(int first_head, const LaneHead& head) const {
        float sums[8][4];
        hadamard(head, signs, sums);
        const int first = 8 * (lane() / 4 % 4) + 64 * (lane() / 16);
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            LanePieces<2> value;
#pragma unroll
            for (int p = 0; p < 2; ++p) {
                float v[8];
#pragma unroll
                for (int i = 0; i < 8; ++i) {
                    v[i] = sums[i][2 * p + h];
                }
                value.piece[p] = pack_bf16x8(v);
            }
            const float largest = largest_if_used<28>(value);
            store_qk<32>({first_head + 2 * (lane() % 4) + h, first}, value, largest);
        }
    }

    // Pieces of a finished head, Apart elements from one to the next; heads are counted from q's first to
    // k's last.
    template <int Apart, int Pieces>
    __device__ __forceinline__ void store_qk(const ManyPieces& to, const LanePieces<Pieces>& value,
                                             float largest) const {
        const int k_head = to.head - q_heads();
        if (k_head >= kv_heads() || slot < 0) {
            return;
        }
        if (k_head >= 0) {
            store_k<Apart>({k_head, to.first}, value, largest);
            return;
        }
        const auto element = static_cast<uint32_t>(to.head * kHeadDim + to.first);
        if (args.q8 != nullptr) {
            const OwnScale own = own_scale(largest);
            if (to.first == 0) {
                args.q8_scale[index * q_heads() + to.head] = own.scale;
            }
            auto* row = reinterpret_cast<std::byte*>(args.q8) + wide(index, args.q8_stride);
            store_pieces<Apart>(value, own, row + element);
            return;
        }
        store_pieces<Apart>(
            value, reinterpret_cast<std::byte*>(args.q_out + wide(index, args.q_out_stride) + element));
    }
    template <int Apart, int Pieces>
    __device__ __forceinline__ void store_k(const ManyPieces& to, const LanePieces<Pieces>& value,
                                            float largest) const {
        if (args.k_scale_offset >= 0) {
            const OwnScale own = own_scale(largest);
            if (to.first == 0) {
                auto* scales = reinterpret_cast<float*>(page() + args.k_scale_offset);
                scales[to.head * kPageSlots + slot] = own.scale;
            }
            store_kv<Apart>(page() + args.k_offset, to, value, own);
            return;
        }
        store_kv<Apart>(page() + args.k_offset, to, value, Divider{args.k_scale, args.k_scale_inverse});
    }
    __device__ __forceinline__ void store_v(int head, const LaneHead& head_values) const {
        if (head >= kv_heads() || slot < 0) {
            return;
        }
        const Divider divide = args.v_head_scale != nullptr ? divider(args.v_head_scale[head])
                                                            : Divider{args.v_scale, args.v_scale_inverse};
        LanePieces<4> value;
#pragma unroll
        for (int p = 0; p < 4; ++p) {
            value.piece[p] = pack_bf16x8(head_values.v[p]);
        }
        store_kv<8 * Lanes>(page() + args.v_offset, {head, 8 * place()}, value, divide);
    }
    template <int Apart, int Pieces, typename Scaled>
    __device__ __forceinline__ void store_kv(std::byte* block, const ManyPieces& to,
                                             const LanePieces<Pieces>& value, const Scaled& scaled) const {
        const int element = (to.head * kPageSlots + slot) * kHeadDim + to.first;
        if (args.kv_dtype == DType::kFloat8E4M3) {
            store_pieces<Apart>(value, scaled, block + element);
        } else {
            store_pieces<Apart>(value, block + 2 * element);
        }
    }
    __device__ std::byte* page() const { return args.pages + wide(page_id, args.page_stride); }
};

template <int Lanes, bool Hadamard>
__global__ void __launch_bounds__(kUnitThreads, kUnitBlocks)
    qkv_post_units_kernel(const __grid_constant__ UnitArgs args) {
    Units<Lanes, Hadamard> units{args};
    const int warp = static_cast<int>(blockIdx.x * kUnitThreads + threadIdx.x) / kWarp;
    const int warps = static_cast<int>(gridDim.x) * (kUnitThreads / kWarp);
    const int all = static_cast<int>(args.tokens) * args.units;
    const int begin = all / warps * warp + min(all % warps, warp);
    const int end = all / warps * (warp + 1) + min(all % warps, warp + 1);
    if constexpr (Hadamard) {
        units.signs = hadamard_signs(units.lane());
    }
    int token = begin / args.units;
    int unit = begin % args.units;
    asm volatile("" ::"r"(token), "r"(unit));  // what took divisions is there before the wait begins
    units.ask(token, unit);
    wait_for_previous_kernel();
    let_next_kernel_start();
    ManyPlace at_next = load_place(args, token);
    LaneRaw raw = units.load(token, unit);
    for (int n = begin; n < end; ++n) {
        if (n == begin || unit == 0) {
            units.set_token(token, at_next);
            at_next = load_place(args, token + 1);
        }
        const int now = unit;
        LaneHead value;
        unpack(raw, value);
        if (++unit == args.units) {
            unit = 0;
            ++token;
        }
        if (n + 1 < end) {
            raw = units.load(token, unit);
        }
        units.make(now, value);
    }
}

// False where there are too few tokens, or no norm.
template <int Lanes, bool Hadamard>
bool launch_units(cudaStream_t stream, const PostArgs& post) {
    constexpr int64_t kOfWarp = kWarp / Lanes;
    constexpr int64_t kBlocks = kUnitBlocks * kMultiprocessors;
    UnitArgs args{post};
    args.qk_units = static_cast<int>((post.q_heads + post.kv_heads + kOfWarp - 1) / kOfWarp);
    args.units = args.qk_units + static_cast<int>((post.kv_heads + kOfWarp - 1) / kOfWarp);
    if (post.tokens * args.units < kBlocks * (kUnitThreads / kWarp) || post.q_norm == nullptr ||
        post.k_norm == nullptr) {
        return false;
    }
    cuda_check(launch_dependent({dim3(static_cast<unsigned>(kBlocks)), kUnitThreads, 0, stream},
                                qkv_post_units_kernel<Lanes, Hadamard>, args));
    return true;
}

}  // namespace tessera::cuda

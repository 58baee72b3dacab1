// Prefill attention's consumers with K and V in e4m3.
//
// The rows of q become e4m3 with a scale each, small enough that no score exceeds float16: the tensor cores
// give float16 scores, in half the registers, and the softmax works on two of them in one instruction. The
// weights are e4m3. What is subtracted from a row's scores moves only when one exceeds it by 2^kGrowth, so
// sums are seldom scaled.
//
// The second operand of an fp8 product must have K (here the slots) contiguous: two warps of the first
// warpgroup have turned V, the slots in the order in which a lane holds its weights. The sums of the tensor
// cores keep few bits: each kSumTiles tiles of V begin from zero and are added to the output in float32.
// Eight more columns of V, ones and zeros, add up the weights themselves as the product takes them, rounded:
// where one slot outweighs all others, its rounding then cancels.
#pragma once

#include "ops/attention/cuda/prefill_consumer.cuh"
#include "ops/common/cuda/half2.cuh"
#include "ops/common/cuda/mma.cuh"
#include "ops/common/cuda/shared_access.cuh"

namespace tessera::cuda::prefill {

inline constexpr int kSumTiles = 8;
inline constexpr int kSums = 68;  // a lane's: 64 of the output, 4 of the weights
// |q| |k| <= 12.75 * 448 sqrt(128) < 65504: rounding to e4m3 makes a row at most 1/16 longer.
inline constexpr float kQueryNorm = 12.0f;

// A consumer's 64 rows of q as e4m3, and their scales. Two threads have a row.
__device__ __forceinline__ void narrow_queries(uint32_t from, uint32_t to, uint32_t scales, int thread,
                                               int barrier) {
    const int row = thread / 2;
    const int part = thread % 2;
    uint4 raw[8];
    float squares = 0;
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        raw[i] = load_shared_16(from + i / 4 * Layout<true>::kQueryHalf + swizzle_128(row, 4 * part + i % 4));
        for (const uint32_t word : {raw[i].x, raw[i].y, raw[i].z, raw[i].w}) {
            squares = fmaf(low_bf16(word), low_bf16(word), squares);
            squares = fmaf(high_bf16(word), high_bf16(word), squares);
        }
    }
    const float norm = fmaxf(sqrtf(warp_reduce<2>(squares, Sum{})), 1e-15f);  // of a row of zeros: not zero
    const float factor = kQueryNorm / norm;
    const auto narrow = [&](uint32_t low, uint32_t high) {
        return pack_e4m3x4(low_bf16(low) * factor, high_bf16(low) * factor, low_bf16(high) * factor,
                           high_bf16(high) * factor);
    };
    __syncwarp();  // its lanes have read the tile's before
#pragma unroll
    for (int i = 0; i < 8; i += 2) {
        store_shared(to + swizzle_128(row, i / 4 * 4 + 2 * part + i % 4 / 2),
                     make_uint4(narrow(raw[i].x, raw[i].y), narrow(raw[i].z, raw[i].w),
                                narrow(raw[i + 1].x, raw[i + 1].y), narrow(raw[i + 1].z, raw[i + 1].w)));
    }
    if (part == 0) {
        store_shared(scales + 4 * row, norm / kQueryNorm);
    }
    group_barrier(barrier, kGroup);
}

// Scaled: K has a scale for each slot, V one for each KV head.
template <bool Scaled, int Blocks>
struct Fp8Consumer : ConsumerBase<true, Blocks> {
    using Base = ConsumerBase<true, Blocks>;
    using Base::args;
    using Base::base;
    using Base::index;
    using Base::thread;
    using Base::tiles;
    using typename Base::L;

    static constexpr float kGrowth = 4.75f;  // log2; with kShift below 448, e4m3's largest
    static constexpr float kShift = 4;       // a whole number: the weight of a row's reference is exact
    static constexpr uint32_t kHidden = 0xFC00FC00;  // -infinity, twice
    static constexpr uint32_t kOnes = 0x3C003C00;
    static constexpr float kSlotUnit = 0x1p-6f;  // of slots' scales, so that float16 keeps small ones

    static constexpr int kOut = 64;

    uint32_t queries[4][4];  // the first operand of the scores, 32 columns a step

    // Of each half's rows, twice in a register: weight = 2^(score * by + offset).
    uint32_t by[2];
    uint32_t offset[2];
    uint32_t limit;   // of row g, of row g + 8: larger scores move the offset
    float factor[2];  // what earlier sums must then be multiplied with
    float sum[2];     // of a lane's share of its rows' weights

    unsigned keys = 0;    // tiles of K whose scores were issued
    unsigned values = 0;  // tiles of V whose product was issued

    __device__ __forceinline__ void begin_tile() {
        const uint32_t from = base + L::kQueries + index * kRows * kSwizzleRowBytes;
        const uint32_t to = base + L::kNarrowQueries + index * kRows * kSwizzleRowBytes;
        narrow_queries(from, to, base + L::kScales + 4 * index * kRows, this->hidden_thread(),
                       kGroupBarrier + index);
        this->end_queries();
        const int lane = this_lane();
        const uint32_t mine = to + swizzle_128(this->hidden_thread() / kWarp * 16 + lane % 16, lane / 16);
#pragma unroll
        for (int step = 0; step < 4; ++step) {
            load_matrices(mine ^ step << 5, queries[step]);
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            by[half] = Scaled ? kOnes : row_scale(half, args.prefill.kv.k_scale);
            offset[half] = 0;
            sum[half] = 0;
        }
        limit = kHidden;
    }

    // What the scores of a row are multiplied with, twice. more: beside the row's own scale.
    __device__ __forceinline__ uint32_t row_scale(int half, float more) const {
        const float own = __uint_as_float(load_shared_4(base + L::kScales + 4 * this->row(half)));
        const float scale = own * args.prefill.scale * kLog2E * more;
        const float finite = fminf(fmaxf(scale, 6e-8f), 65504.0f);  // zero times -infinity would be NaN
        return half2_from(finite, finite);
    }

    // Waits for the next K. Returns the KV tile.
    __device__ __forceinline__ int issue_scores(uint32_t (&scores)[32]) {
        const unsigned stage = keys % L::kKeyStages;
        barrier_wait(full_barrier(base + L::kKeyBarriers, stage), keys / L::kKeyStages % 2);
        const int kv_tile = static_cast<int>(load_shared_4(base + L::kKvTiles + 4 * stage));
        const uint32_t k = mma_operand(base + L::kKeys) + stage * (L::kKvBytes >> 4);
        mma_pin(scores);
        mma_begin();
#pragma unroll
        for (int step = 0; step < 4; ++step) {
            mma_registers_half(scores, queries[step], mma_descriptor_of(k + step * (kMmaStepBytes >> 4)),
                               step > 0);
        }
        mma_commit();
        ++keys;
        return kv_tile;
    }
    // The scores are there: K may go.
    __device__ __forceinline__ void end_keys(uint32_t (&scores)[32]) const {
        const unsigned stage = (keys - 1) % L::kKeyStages;
        const uint32_t empty = empty_barrier(base + L::kKeyBarriers, stage);
        if (Scaled) {
            scale_scores(scores, base + L::kKeyScales + 2 * stage * kScaleBytes);
            barrier_arrive(empty);
        } else {
            this->leave(empty);
        }
    }
    // By the scales of their slots and rows: then weight = 2^(score + offset).
    __device__ __forceinline__ void scale_scores(uint32_t (&scores)[32], uint32_t scales) const {
        const uint32_t rows[2] = {row_scale(0, kSlotUnit), row_scale(1, kSlotUnit)};
        constexpr float kUnit = 1 / kSlotUnit;
#pragma unroll
        for (int i = 0; i < 16; ++i) {
            const float2 raw = load_shared_float2(scales + 4 * (8 * i + thread % 4 * 2));
            const uint32_t slots = half2_from(raw.x * kUnit, raw.y * kUnit);
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                uint32_t& score = scores[2 * i + half];
                score = half2_multiply(score, half2_multiply(slots, rows[half]));
            }
        }
    }

    // Waits for the next V. fresh: the sums begin at zero.
    __device__ __forceinline__ void issue_values(float (&sums)[kSums], const uint32_t (&packed)[4][4],
                                                 bool fresh) {
        const unsigned stage = values % L::kTurnedStages;
        barrier_wait(full_barrier(base + L::kTurnedBarriers, stage), values / L::kTurnedStages % 2);
        const uint32_t v = mma_operand(base + L::kTurned) + stage * (L::kTurnedBytes >> 4);
        mma_pin(sums);
        mma_begin();
#pragma unroll
        for (int step = 0; step < 4; ++step) {
            mma_registers_fp8(sums, packed[step], mma_descriptor_of(v + step * (kMmaStepBytes >> 4)),
                              step > 0 || !fresh);
        }
        mma_commit();
        ++values;
    }
    __device__ __forceinline__ void end_values() {
        this->arrive(empty_barrier(base + L::kTurnedBarriers, (values - 1) % L::kTurnedStages));
    }

    // Hides what the rows may not see.
    __device__ __forceinline__ void hide(uint32_t (&scores)[32], const Tile& tile, int kv_tile) const {
        const int first = kv_tile * kPrefillKvSlots;
        const int first_slot = args.prefill.plan.first_slot;
        if (first >= first_slot && first + kPrefillKvSlots - 1 <= tile.first) {
            return;
        }
        const int seen[2] = {this->slots_seen(tile, 0, first), this->slots_seen(tile, 1, first)};
#pragma unroll
        for (int i = 0; i < 32; ++i) {
            const int first_of_two = i / 2 * 2;
            const uint32_t one = __byte_perm(scores[i], kHidden, 0x7610);
            const uint32_t most = first_of_two + 1 < seen[i % 2] ? scores[i] : one;
            scores[i] = first_of_two < seen[i % 2] ? most : kHidden;
        }
        if (first < first_slot) {
            const int unseen = this->slots_before(first_slot - first);
#pragma unroll
            for (int i = 0; i < 32; ++i) {
                const int first_of_two = i / 2 * 2;
                const uint32_t one = __byte_perm(scores[i], kHidden, 0x3254);
                const uint32_t most = first_of_two < unseen ? one : scores[i];
                scores[i] = first_of_two + 1 < unseen ? kHidden : most;
            }
        }
    }

    // Moves the offsets of rows whose scores have grown too much. Returns whether a row of this warp has
    // moved: then all sums must be multiplied with factor.
    __device__ __forceinline__ bool move_offsets(const uint32_t (&scores)[32]) {
        uint32_t most[2] = {scores[0], scores[1]};  // of even and of odd columns
#pragma unroll
        for (int i = 2; i < 32; ++i) {
            most[i % 2] = half2_max(most[i % 2], scores[i]);
        }
        uint32_t rows =
            half2_max(__byte_perm(most[0], most[1], 0x5410), __byte_perm(most[0], most[1], 0x7632));
        const bool grown = __any_sync(kFullWarp, half2_any_greater(rows, limit)) != 0;
        if (grown) {
            rows = half2_max(rows, __shfl_xor_sync(kFullWarp, rows, 1));
            rows = half2_max(rows, __shfl_xor_sync(kFullWarp, rows, 2));
            const float limits[2] = {move_offset(0, half2_low(rows), half2_low(limit)),
                                     move_offset(1, half2_high(rows), half2_high(limit))};
            limit = half2_from(limits[0], limits[1]);
        }
        return grown;
    }
    // Returns the row's new limit.
    __device__ __forceinline__ float move_offset(int half, float most, float old_limit) {
        factor[half] = 1;
        if (!(most > old_limit)) {
            return old_limit;
        }
        const float scale = half2_low(by[half]);
        const float moved = kShift - most * scale;
        const float old_offset = half2_low(offset[half]);
        offset[half] = half2_from(moved, moved);
        // Nothing was summed up before the first offset.
        factor[half] = old_limit == -INFINITY ? 0.0f : exp2_fast(half2_low(offset[half]) - old_offset);
        return most + kGrowth / scale;
    }

    // Scores to weights, in the order in which turn_page() puts the slots.
    __device__ __forceinline__ void soften(const uint32_t (&scores)[32], uint32_t (&packed)[4][4]) const {
        uint32_t all = 0;
        this->wait_turn();
#pragma unroll
        for (int i = 0; i < 16; ++i) {
            const int half = i % 2;
            const int at = i / 2 * 4 + half;
            const uint32_t a = half2_exp2(half2_fma(scores[at], by[half], offset[half]));
            const uint32_t second = half2_fma(scores[at + 2], by[half], offset[half]);
            // A quarter of them elsewhere, of the same slots for every row.
            const uint32_t b = i / 2 % 2 == 1 ? half2_exp2_by_adding(second) : half2_exp2(second);
            packed[i / 4][i % 4] = pack_e4m3x4(a, b);
            all |= packed[i / 4][i % 4];
        }
        this->pass_turn(all);
    }

    __device__ __forceinline__ void add(float (&out)[64], const float (&sums)[kSums]) {
#pragma unroll
        for (int i = 0; i < 64; ++i) {
            out[i] += sums[i];
        }
        sum[0] += sums[64] + sums[65];
        sum[1] += sums[66] + sums[67];
    }
    __device__ __forceinline__ void rescale(float (&out)[64], float (&sums)[kSums]) {
#pragma unroll
        for (int i = 0; i < 64; ++i) {
            out[i] *= factor[i / 2 % 2];
        }
#pragma unroll
        for (int i = 0; i < kSums; ++i) {
            sums[i] *= factor[i / 2 % 2];
        }
        sum[0] *= factor[0];
        sum[1] *= factor[1];
    }
    // The product of KV tile `kv_tile` is there. Returns whether that of `next_tile` begins anew.
    __device__ __forceinline__ bool settle(float (&out)[64], float (&sums)[kSums], int kv_tile, int next_tile,
                                           bool grown) {
        mma_pin(sums);
        end_values();
        const bool fresh = (kv_tile ^ next_tile) / kSumTiles != 0;
        if (fresh) {
            add(out, sums);
        }
        if (grown) {
            rescale(out, sums);
        }
        return fresh;
    }

    // The first KV tile's weights. Returns the KV tile.
    __device__ __forceinline__ int begin_steps(const Tile& tile, uint32_t (&scores)[32],
                                               uint32_t (&packed)[4][4]) {
        const int kv_tile = issue_scores(scores);
        mma_wait<0>();
        mma_pin(scores);
        end_keys(scores);
        hide(scores, tile, kv_tile);
        move_offsets(scores);
        soften(scores, packed);
        return kv_tile;
    }

    __device__ __forceinline__ void attend_steps(const Tile& tile, float (&out)[64]) {
        float sums[kSums];
        uint32_t packed[4][4];
        uint32_t scores[32];
        bool fresh = true;
        int kv_tile = begin_steps(tile, scores, packed);
#pragma unroll 1
        for (int step = 1; step < tile.steps; ++step) {
            const int next_tile = issue_scores(scores);
            issue_values(sums, packed, fresh);
            mma_wait<1>();
            mma_pin(scores);
            end_keys(scores);
            hide(scores, tile, next_tile);
            const bool grown = move_offsets(scores);
            mma_wait<0>();
            fresh = settle(out, sums, kv_tile, next_tile, grown);
            soften(scores, packed);
            kv_tile = next_tile;
        }
        end_steps(out, sums, packed, fresh);
    }
    __device__ __forceinline__ void end_steps(float (&out)[64], float (&sums)[kSums],
                                              const uint32_t (&packed)[4][4], bool fresh) {
        issue_values(sums, packed, fresh);
        mma_wait<0>();
        mma_pin(sums);
        end_values();
        add(out, sums);
    }

    __device__ __forceinline__ void end_tile(const float (&out)[kOut]) const {
        this->store(this->this_tile(), out, sum);
    }
};

}  // namespace tessera::cuda::prefill

// Prefill attention's consumers with K and V in bfloat16.
//
// What is subtracted from a row's scores is the maximum of the first KV tile in which it sees something, plus
// kRoom: weights begin at 2^-kRoom. No later maximum is looked for: only when a weight reaches 2, which one
// bit tells of all weights at once, does it move, so the output is hardly ever scaled. Columns 128 to 135 of
// V are a one and seven zeros: they add up the weights as the product takes them, rounded.
#pragma once

#include "ops/attention/cuda/prefill_consumer.cuh"
#include "ops/common/cuda/mma.cuh"
#include "ops/common/cuda/shared_access.cuh"

namespace tessera::cuda::prefill {

// The column of ones behind each V, and zeros.
__device__ __forceinline__ void write_sum_columns(uint32_t base, int thread) {
    using L = Layout<false>;
    constexpr uint32_t kOne = 0x3F80;  // in bfloat16
    if (thread < L::kValueStages * kPrefillKvSlots) {
        const uint32_t value = base + L::kValues + thread / kPrefillKvSlots * L::kValueStride;
        store_shared(value + L::kKvBytes + swizzle_128(thread % kPrefillKvSlots, 0),
                     make_uint4(kOne, 0, 0, 0));
    }
    fence_proxy_async();
}

struct Bf16Consumer : ConsumerBase<false, 1> {
    static constexpr int kOut = 68;                 // a lane's: 64 of the output, then its rows' sums
    static constexpr float kRoom = 32;              // log2
    static constexpr uint32_t kLarge = 0x40004000;  // a bit of two bfloat16 that are 2 or more
    static constexpr float kNoZero = -0x1p100f;     // before the first: weights become infinite

    int steps = 0;     // K of this many tiles has been used
    int kv_tile;       // the last one of them
    uint32_t queries;  // the first operand of the scores

    float by;         // weight = 2^(score * by - zero)
    float zero[2];    // of each half's rows
    float factor[2];  // what earlier sums must be multiplied with when a zero has moved

    __device__ __forceinline__ void begin_tile() {
        by = args.prefill.scale * kLog2E;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            zero[half] = kNoZero;
        }
        queries = base + L::kQueries + stage_of<L::kQueryStages>(tiles) * 2 * L::kQueryHalf +
                  index * kRows * kSwizzleRowBytes;
    }

    __device__ __forceinline__ int key() const { return stage_of<L::kKeyStages>(steps); }
    // Of the KV tile before.
    __device__ __forceinline__ int value() const { return stage_of<L::kValueStages>(steps - 1); }

    // Waits for the next K. Returns the KV tile.
    __device__ __forceinline__ int wait_keys() {
        barrier_wait(full_barrier(base + L::kKeyBarriers, key()), parity_of<L::kKeyStages>(steps));
        return static_cast<int>(load_shared_4(base + L::kKvTiles + 4 * key()));
    }
    __device__ __forceinline__ void issue_scores(float (&scores)[64]) {
        const uint32_t keys = base + L::kKeys + key() * L::kKvBytes;
        mma_begin();
#pragma unroll
        for (int step = 0; step < 8; ++step) {
            const uint32_t at = static_cast<uint32_t>(step % 4 * kMmaStepBytes);
            mma_shared<false>(scores, mma_descriptor(queries + step / 4 * L::kQueryHalf + at),
                              mma_descriptor(keys + step / 4 * L::kHalf + at), step > 0);
        }
        mma_commit();
    }
    __device__ __forceinline__ void end_keys() { arrive(empty_barrier(base + L::kKeyBarriers, key())); }

    __device__ __forceinline__ void wait_values(const Tile& tile) {
        barrier_wait(full_barrier(base + L::kValueBarriers, value()), parity_of<L::kValueStages>(steps - 1));
        if (has_unseen(args, tile, kv_tile)) {
            clear_unseen(tile);
        }
    }
    // Zeros for the slots that no row sees: 0 times what may lie there could be NaN. Both consumers write
    // them.
    __device__ __forceinline__ void clear_unseen(const Tile& tile) {
        const int slot = kv_tile * kPrefillKvSlots + thread;
        if (slot < args.prefill.plan.first_slot || slot >= tile.slots) {
            const uint32_t to = base + L::kValues + value() * L::kValueStride;
#pragma unroll
            for (int i = 0; i < 16; ++i) {
                store_shared(to + i / 8 * L::kHalf + swizzle_128(thread, (i + thread / 8) % 8),
                             make_uint4(0, 0, 0, 0));
            }
        }
        fence_proxy_async();
        group_barrier(kGroupBarrier + index, kGroup);
    }
    __device__ __forceinline__ void issue_values(float (&sums)[kOut], const uint32_t (&packed)[8][4]) {
        const uint32_t values = base + L::kValues + value() * L::kValueStride;
        mma_begin();
#pragma unroll
        for (int step = 0; step < 8; ++step) {
            mma_registers_transposed(
                sums, packed[step],
                mma_descriptor_transposed(values + step * 16 * kSwizzleRowBytes, L::kHalf));
        }
        mma_commit();
    }
    __device__ __forceinline__ void end_values() { arrive(empty_barrier(base + L::kValueBarriers, value())); }

    // Hides what the rows may not see.
    __device__ __forceinline__ void hide(float (&scores)[64], const Tile& tile) {
        const int first = kv_tile * kPrefillKvSlots;
        const int first_slot = args.prefill.plan.first_slot;
        if (first >= first_slot && first + kPrefillKvSlots - 1 <= tile.first) {
            return;
        }
        const int seen[2] = {slots_seen(tile, 0, first), slots_seen(tile, 1, first)};
#pragma unroll
        for (int i = 0; i < 64; ++i) {
            scores[i] = i / 4 * 2 + i % 2 < seen[i / 2 % 2] ? scores[i] : -INFINITY;
        }
        if (first < first_slot) {
            const int unseen = slots_before(first_slot - first);
#pragma unroll
            for (int i = 0; i < 64; ++i) {
                scores[i] = i / 4 * 2 + i % 2 < unseen ? -INFINITY : scores[i];
            }
        }
    }

    // Scores to weights. all: their bits, of each half.
    __device__ __forceinline__ void exponentiate(const float (&scores)[64], uint32_t (&packed)[8][4],
                                                 uint32_t (&all)[2]) const {
        all[0] = 0;
        all[1] = 0;
#pragma unroll
        for (int i = 0; i < 32; ++i) {
            const int half = i % 2;
            const float a = exp2_fast(fmaf(scores[2 * i], by, -zero[half]));
            const float b = exp2_fast(fmaf(scores[2 * i + 1], by, -zero[half]));
            packed[i / 4][i % 4] = pack_bf16(a, b);
            all[half] |= packed[i / 4][i % 4];
        }
    }
    // Moves the zeros of rows whose weights are too large or have none, each row for itself.
    __device__ __forceinline__ void move_zeros(const float (&scores)[64], const uint32_t (&all)[2]) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float most = fmaxf(scores[2 * half], scores[2 * half + 1]);
#pragma unroll
            for (int i = 4 + 2 * half; i < 64; i += 4) {
                most = fmaxf(most, fmaxf(scores[i], scores[i + 1]));
            }
            most = warp_reduce<4>(most, Max{});
            factor[half] = 1;
            uint32_t grown = all[half] & kLarge;
            grown |= __shfl_xor_sync(kFullWarp, grown, 1);
            grown |= __shfl_xor_sync(kFullWarp, grown, 2);
            if (most > -INFINITY && grown != 0) {
                const float moved = fmaf(most, by, kRoom);
                // Nothing was summed up before the first zero.
                factor[half] = zero[half] == kNoZero ? 0.0f : exp2_fast(zero[half] - moved);
                zero[half] = moved;
            }
        }
    }
    __device__ __forceinline__ void take_turn(const float (&scores)[64], uint32_t (&packed)[8][4],
                                              uint32_t (&all)[2]) const {
        wait_turn();
        exponentiate(scores, packed, all);
        pass_turn(all[0] | all[1]);
    }
    // Of the first KV tile: all zeros move.
    __device__ __forceinline__ void soften_first(const float (&scores)[64], uint32_t (&packed)[8][4]) {
        uint32_t all[2] = {kLarge, kLarge};
        move_zeros(scores, all);
        take_turn(scores, packed, all);
    }
    // Returns whether zeros of this warp have moved: then all earlier sums must be multiplied with factor.
    __device__ __forceinline__ bool soften(const float (&scores)[64], uint32_t (&packed)[8][4]) {
        uint32_t all[2];
        take_turn(scores, packed, all);
        const bool grown = __any_sync(kFullWarp, ((all[0] | all[1]) & kLarge) != 0) != 0;
        if (grown) {
            move_zeros(scores, all);
            exponentiate(scores, packed, all);
        }
        return grown;
    }
    __device__ __forceinline__ void rescale(float (&out)[kOut]) {
#pragma unroll
        for (int i = 0; i < kOut; ++i) {
            out[i] *= factor[i / 2 % 2];
        }
    }

    // From the weights of a KV tile to those of the next, which become ready beside the product.
    __device__ __forceinline__ void advance(const Tile& tile, float (&out)[kOut], float (&scores)[64],
                                            const uint32_t (&packed)[8][4], uint32_t (&next)[8][4]) {
        const int next_tile = wait_keys();
        issue_scores(scores);
        wait_values(tile);
        kv_tile = next_tile;
        mma_pin(out);
        issue_values(out, packed);
        mma_wait<1>();
        mma_pin(scores);
        end_keys();
        hide(scores, tile);
        const bool grown = soften(scores, next);
        mma_wait<0>();
        mma_pin(out);
        end_values();
        ++steps;
        if (grown) {
            rescale(out);
        }
    }
    __device__ __forceinline__ void end_steps(const Tile& tile, float (&out)[kOut],
                                              const uint32_t (&packed)[8][4]) {
        wait_values(tile);
        mma_pin(out);
        issue_values(out, packed);
        mma_wait<0>();
        mma_pin(out);
        end_values();
    }
    __device__ __forceinline__ void attend_steps(const Tile& tile, float (&out)[kOut]) {
        float scores[64];
        uint32_t packed[2][8][4];
        kv_tile = wait_keys();
        issue_scores(scores);
        mma_wait<0>();
        mma_pin(scores);
        end_keys();
        ++steps;
        hide(scores, tile);
        soften_first(scores, packed[0]);
        int step = 1;
#pragma unroll 1
        for (; step + 1 < tile.steps; step += 2) {
            advance(tile, out, scores, packed[0], packed[1]);
            advance(tile, out, scores, packed[1], packed[0]);
        }
        if (step < tile.steps) {
            advance(tile, out, scores, packed[0], packed[1]);
            end_steps(tile, out, packed[1]);
        } else {
            end_steps(tile, out, packed[0]);
        }
    }

    __device__ __forceinline__ void end_tile(const float (&out)[kOut]) const {
        end_queries();
        store(this_tile(), out, {out[64], out[66]});
    }
};

}  // namespace tessera::cuda::prefill

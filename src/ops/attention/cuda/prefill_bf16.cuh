// Prefill attention's consumers with K and V in bfloat16.
//
// What is subtracted from a row's scores is the maximum of the first KV tile in which it sees something. No
// later maximum is looked for: only when a lane's weights add up to more than kMost does it move, so the
// output is hardly ever scaled.
#pragma once

#include "ops/attention/cuda/prefill_consumer.cuh"

namespace tessera::cuda::prefill {

struct Bf16Consumer : ConsumerBase<false> {
    static constexpr float kMost = 0x1p32f;
    static constexpr float kNoZero = -0x1p100f;  // before the first: weights become infinite

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
            sum[half] = 0;
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
            const uint32_t to = base + L::kValues + value() * L::kKvBytes;
#pragma unroll
            for (int i = 0; i < 16; ++i) {
                store_shared_16(to + i / 8 * L::kHalf + swizzle_128(thread, (i + thread / 8) % 8),
                                make_uint4(0, 0, 0, 0));
            }
        }
        fence_proxy_async();
        group_barrier(kGroupBarrier + index, kGroup);
    }
    __device__ __forceinline__ void issue_values(float (&sums)[64], const uint32_t (&packed)[8][4]) {
        const uint32_t values = base + L::kValues + value() * L::kKvBytes;
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
        const int limits[2] = {tile.first + row(0) / args.group, tile.first + row(1) / args.group};
#pragma unroll
        for (int i = 0; i < 64; ++i) {
            const int slot = first + i / 4 * 8 + thread % 4 * 2 + i % 2;
            const bool visible = slot >= first_slot && slot <= limits[i / 2 % 2];
            scores[i] = visible ? scores[i] : -INFINITY;
        }
    }

    // Scores to weights. totals: of this lane's, of each half, as the product takes them, rounded: where one
    // slot outweighs all others, its rounding then cancels.
    __device__ __forceinline__ void exponentiate(const float (&scores)[64], uint32_t (&packed)[8][4],
                                                 float (&totals)[2]) const {
        float parts[2][2];
#pragma unroll
        for (int i = 0; i < 32; ++i) {
            const int half = i % 2;
            const float a = exp2_fast(fmaf(scores[2 * i], by, -zero[half]));
            const float b = exp2_fast(fmaf(scores[2 * i + 1], by, -zero[half]));
            float& part = parts[half][i / 2 % 2];
            const uint32_t both = pack_bf16(a, b);
            const float rounded = low_bf16(both) + high_bf16(both);
            part = i < 4 ? rounded : part + rounded;
            packed[i / 4][i % 4] = both;
        }
        totals[0] = parts[0][0] + parts[0][1];
        totals[1] = parts[1][0] + parts[1][1];
    }
    // Moves the zeros of rows whose weights are too large or have none, each row for itself.
    __device__ __forceinline__ void move_zeros(const float (&scores)[64], const float (&totals)[2]) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float most = fmaxf(scores[2 * half], scores[2 * half + 1]);
#pragma unroll
            for (int i = 4 + 2 * half; i < 64; i += 4) {
                most = fmaxf(most, fmaxf(scores[i], scores[i + 1]));
            }
            most = warp_reduce<4>(most, Max{});
            factor[half] = 1;
            const float total = warp_reduce<4>(totals[half], Max{});
            if (most > -INFINITY && total > kMost) {
                const float moved = most * by;
                // Nothing was summed up before the first zero.
                factor[half] = zero[half] == kNoZero ? 0.0f : exp2_fast(zero[half] - moved);
                zero[half] = moved;
                sum[half] *= factor[half];
            }
        }
    }
    __device__ __forceinline__ void take_turn(const float (&scores)[64], uint32_t (&packed)[8][4],
                                              float (&totals)[2]) const {
        wait_turn();
        exponentiate(scores, packed, totals);
        pass_turn(__float_as_uint(totals[0]) | __float_as_uint(totals[1]));
    }
    // Of the first KV tile: all zeros move.
    __device__ __forceinline__ void soften_first(const float (&scores)[64], uint32_t (&packed)[8][4]) {
        move_zeros(scores, {INFINITY, INFINITY});
        take_turn(scores, packed, sum);
    }
    // Returns whether zeros of this warp have moved: then all earlier sums must be multiplied with factor.
    __device__ __forceinline__ bool soften(const float (&scores)[64], uint32_t (&packed)[8][4]) {
        float totals[2];
        take_turn(scores, packed, totals);
        const bool grown = __any_sync(kFullWarp, fmaxf(totals[0], totals[1]) > kMost) != 0;
        if (grown) {
            move_zeros(scores, totals);
            exponentiate(scores, packed, totals);
        }
        sum[0] += totals[0];
        sum[1] += totals[1];
        return grown;
    }
    __device__ __forceinline__ void rescale(float (&out)[64]) {
#pragma unroll
        for (int i = 0; i < 64; ++i) {
            out[i] *= factor[i / 2 % 2];
        }
    }

    // From the weights of a KV tile to those of the next, which become ready beside the product.
    __device__ __forceinline__ void advance(const Tile& tile, float (&out)[64], float (&scores)[64],
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
    __device__ __forceinline__ void end_steps(const Tile& tile, float (&out)[64],
                                              const uint32_t (&packed)[8][4]) {
        wait_values(tile);
        mma_pin(out);
        issue_values(out, packed);
        mma_wait<0>();
        mma_pin(out);
        end_values();
    }
    __device__ __forceinline__ void attend_steps(const Tile& tile, float (&out)[64]) {
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

    __device__ __forceinline__ void run() {
        begin_turns();
        for (;; ++tiles) {
            const Tile tile = wait_tile();
            if (tile.steps < 0) {
                break;
            }
            begin_tile();
            float out[64] = {};
            if (tile.steps > 0) {
                attend_steps(tile, out);
            }
            end_queries();
            store(this_tile(), out);
        }
        end_turns();
    }
};

}  // namespace tessera::cuda::prefill

// Prefill attention's consumers with K and V in bfloat16.
//
// What is subtracted from a row's scores moves only when one exceeds it by 2^kGrowth, so the output is seldom
// scaled.
#pragma once

#include "ops/attention/cuda/prefill_consumer.cuh"

namespace tessera::cuda::prefill {

struct Bf16Consumer : ConsumerBase<false> {
    static constexpr float kGrowth = 8;  // log2

    int steps = 0;  // K of this many tiles has been used

    float by;         // weight = 2^(score * by - zero)
    float zero[2];    // of each half's rows
    float limit[2];   // larger scores move the zero
    float factor[2];  // what earlier sums must then be multiplied with

    // Returns the first operand of the scores.
    __device__ __forceinline__ uint32_t begin_tile() {
        by = args.prefill.scale * kLog2E;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            zero[half] = 0;
            limit[half] = -INFINITY;
            sum[half] = 0;
        }
        return base + L::kQueries + stage_of<L::kQueryStages>(tiles) * 2 * L::kQueryHalf +
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
    __device__ __forceinline__ void issue_scores(float (&scores)[64], uint32_t queries) {
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

    __device__ __forceinline__ void wait_values(const Tile& tile, int kv_tile) {
        barrier_wait(full_barrier(base + L::kValueBarriers, value()), parity_of<L::kValueStages>(steps - 1));
        if (has_unseen(args, tile, kv_tile)) {
            clear_unseen(tile, kv_tile);
        }
    }
    // Zeros for the slots that no row sees: 0 times what may lie there could be NaN. Both consumers write
    // them.
    __device__ __forceinline__ void clear_unseen(const Tile& tile, int kv_tile) {
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
    __device__ __forceinline__ void hide(float (&scores)[64], const Tile& tile, int kv_tile) {
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

    // Moves the zeros of rows whose scores have grown too much. Returns whether a row of this warp has moved:
    // then all sums must be multiplied with factor.
    __device__ __forceinline__ bool move_zeros(const float (&scores)[64]) {
        float most[2];
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            most[half] = fmaxf(scores[2 * half], scores[2 * half + 1]);
#pragma unroll
            for (int i = 4 + 2 * half; i < 64; i += 4) {
                most[half] = fmaxf(most[half], fmaxf(scores[i], scores[i + 1]));
            }
        }
        const bool grown = __any_sync(kFullWarp, most[0] > limit[0] || most[1] > limit[1]) != 0;
        if (grown) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                most[half] = warp_reduce<4>(most[half], Max{});
                factor[half] = 1;
                if (most[half] > limit[half]) {
                    const float moved = most[half] * by;
                    // Nothing was summed up before the first zero.
                    factor[half] = limit[half] == -INFINITY ? 0.0f : exp2_fast(zero[half] - moved);
                    zero[half] = moved;
                    limit[half] = most[half] + kGrowth / by;
                    sum[half] *= factor[half];
                }
            }
        }
        return grown;
    }

    // Scores to weights.
    __device__ __forceinline__ void soften(const float (&scores)[64], uint32_t (&packed)[8][4]) {
        float totals[2][2];
        wait_turn();
#pragma unroll
        for (int i = 0; i < 32; ++i) {
            const int half = i % 2;
            const float a = exp2_fast(fmaf(scores[2 * i], by, -zero[half]));
            const float b = exp2_fast(fmaf(scores[2 * i + 1], by, -zero[half]));
            float& total = totals[half][i / 2 % 2];
            total = i < 4 ? a + b : total + (a + b);
            packed[i / 4][i % 4] = pack_bf16(a, b);
        }
#pragma unroll
        for (int step = 0; step < 8; ++step) {
            mma_pin(packed[step]);
        }
        pass_turn();
        sum[0] += totals[0][0] + totals[0][1];
        sum[1] += totals[1][0] + totals[1][1];
    }
    __device__ __forceinline__ void rescale(float (&out)[64]) {
#pragma unroll
        for (int i = 0; i < 64; ++i) {
            out[i] *= factor[i / 2 % 2];
        }
    }

    __device__ __forceinline__ void attend_steps(const Tile& tile, uint32_t queries, float (&out)[64]) {
        float scores[64];
        uint32_t packed[8][4];
        int kv_tile = wait_keys();
        issue_scores(scores, queries);
        mma_wait<0>();
        mma_pin(scores);
        end_keys();
        ++steps;
        hide(scores, tile, kv_tile);
        move_zeros(scores);
        soften(scores, packed);
        for (int step = 1; step < tile.steps; ++step) {
            const int next_tile = wait_keys();
            issue_scores(scores, queries);
            wait_values(tile, kv_tile);
            kv_tile = next_tile;
            mma_pin(out);
            issue_values(out, packed);
            mma_wait<1>();
            mma_pin(scores);
            end_keys();
            hide(scores, tile, kv_tile);
            const bool grown = move_zeros(scores);
            mma_wait<0>();
            mma_pin(out);
            end_values();
            ++steps;
            if (grown) {
                rescale(out);
            }
            soften(scores, packed);
        }
        wait_values(tile, kv_tile);
        mma_pin(out);
        issue_values(out, packed);
        mma_wait<0>();
        mma_pin(out);
        end_values();
    }

    __device__ __forceinline__ void run() {
        begin_turns();
        for (;; ++tiles) {
            const Tile tile = wait_tile();
            if (tile.steps < 0) {
                break;
            }
            const uint32_t queries = begin_tile();
            float out[64] = {};
            if (tile.steps > 0) {
                attend_steps(tile, queries, out);
            }
            end_queries();
            store(this_tile(), out);
        }
        end_turns();
    }
};

}  // namespace tessera::cuda::prefill

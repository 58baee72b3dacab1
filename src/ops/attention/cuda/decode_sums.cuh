// What decode attention accumulates for the rows of a piece, and how such parts travel between blocks.
//
// A partial result needs no flag and no fence: a word is valid once it differs from kUnwritten, which the
// plan writes everywhere and the reader writes again when it has read. One write and one read of the L2 cache
// are all that a part's way costs.
#pragma once

#include <cstdint>

#include "ops/attention/cuda/decode_layout.cuh"
#include "ops/common/cuda/async_copy.cuh"
#include "ops/common/cuda/mma.cuh"

namespace tessera::cuda {

inline constexpr int kMathThreads = 128;  // the warpgroup that computes
inline constexpr int kMathBarrier = 1;    // named, of its threads
inline constexpr int kMathWarps = kMathThreads / kWarp;

// Seen by every block, in no order; each word is written, and read, as a whole.
__device__ __forceinline__ void store_relaxed(float* to, const float4& v) {
    asm volatile("st.relaxed.gpu.global.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(v.x), "f"(v.y),
                 "f"(v.z), "f"(v.w)
                 : "memory");
}
__device__ __forceinline__ float4 load_relaxed(const float* from) {
    float4 v;
    asm volatile("ld.relaxed.gpu.global.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
                 : "l"(from)
                 : "memory");
    return v;
}

// A thread's share: columns 8 j + 2 t + {0, 1} (rows of the attention: query and head) for t = lane % 4.
template <int Rows>
struct DecodeSums {
    static constexpr int kBlocks = Rows / 8;    // of 8 columns
    static constexpr int kWords = 2 * kBlocks;  // of four sums

    // Another thread's share of the same place, as it travels.
    struct Part {
        float4 out[kWords];
        float4 states[kBlocks];
    };

    float base[kBlocks][2];  // the maximum so far, log2
    float sum[kBlocks][2];   // of this thread's slots; after the piece, of all
    float out[2][Rows / 2];  // O^T, not divided: [half of the dimensions][4 j + c], [4 j + 2 + c]

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int j = 0; j < kBlocks; ++j) {
#pragma unroll
            for (int c = 0; c < 2; ++c) {
                base[j][c] = -INFINITY;
                sum[j][c] = 0;
            }
        }
#pragma unroll
        for (int i = 0; i < Rows; ++i) {
            out[i / (Rows / 2)][i % (Rows / 2)] = 0;
        }
    }

    __device__ __forceinline__ Part part() const {
        Part p;
#pragma unroll
        for (int i = 0; i < kWords; ++i) {
            const int j = 4 * (i % kBlocks);
            const int half = i / kBlocks;
            p.out[i] = make_float4(out[half][j], out[half][j + 1], out[half][j + 2], out[half][j + 3]);
        }
#pragma unroll
        for (int j = 0; j < kBlocks; ++j) {
            p.states[j] = make_float4(base[j][0], sum[j][0], base[j][1], sum[j][1]);
        }
        return p;
    }
    __device__ __forceinline__ void add(const Part& p) {
#pragma unroll
        for (int j = 0; j < kBlocks; ++j) {
            const float bases[2] = {p.states[j].x, p.states[j].z};
            const float sums[2] = {p.states[j].y, p.states[j].w};
            float own[2];
            float other[2];
#pragma unroll
            for (int c = 0; c < 2; ++c) {
                const float most = fmaxf(base[j][c], bases[c]);
                const float finite = most == -INFINITY ? 0.0f : most;
                own[c] = exp2_fast(base[j][c] - finite);
                other[c] = exp2_fast(bases[c] - finite);
                base[j][c] = most;
                sum[j][c] = fmaf(sum[j][c], own[c], sums[c] * other[c]);
            }
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const float4 more = p.out[half * kBlocks + j];
                float(&to)[Rows / 2] = out[half];
                to[4 * j] = fmaf(to[4 * j], own[0], more.x * other[0]);
                to[4 * j + 1] = fmaf(to[4 * j + 1], own[1], more.y * other[1]);
                to[4 * j + 2] = fmaf(to[4 * j + 2], own[0], more.z * other[0]);
                to[4 * j + 3] = fmaf(to[4 * j + 3], own[1], more.w * other[1]);
            }
        }
    }
};

// Parts in device memory, of one of the block's computing threads.
template <int Rows>
class DecodePartials {
    using Sums = DecodeSums<Rows>;
    using Part = typename Sums::Part;
    static constexpr int kAhead = Rows == 8 ? 4 : 1;  // parts under way

  public:
    __device__ DecodePartials(float* partials, int thread) : partials_(partials), thread_(thread) {}

    __device__ __forceinline__ void publish(int slot, const Sums& sums) const {
        const Part p = sums.part();
#pragma unroll
        for (int i = 0; i < Sums::kWords; ++i) {
            store_relaxed(out_at(slot, i), written(p.out[i]));
        }
        if (thread_ < 4) {
#pragma unroll
            for (int j = 0; j < Sums::kBlocks; ++j) {
                store_relaxed(states_at(slot, j), written(p.states[j]));
            }
        }
    }
    // Adds the parts of pieces first, first + step, .. < end as they come. Every thread calls it.
    __device__ __forceinline__ void collect(const DecodePieces& all, int first, int step, int end,
                                            Sums& sums) const {
        for (int piece = first; piece < end; piece += kAhead * step) {
            Part parts[kAhead];
#pragma unroll
            for (int i = 0; i < kAhead; ++i) {
                if (piece + i * step < end) {
                    load(all.slot(piece + i * step), parts[i]);
                }
            }
#pragma unroll
            for (int i = 0; i < kAhead; ++i) {
                if (piece + i * step < end) {
                    while (!complete(parts[i])) {
                        load(all.slot(piece + i * step), parts[i]);
                    }
                    sums.add(parts[i]);
                }
            }
        }
        group_barrier(kMathBarrier, kMathThreads);  // several threads read the same states
        const float none = __uint_as_float(kUnwritten);
        for (int piece = first; piece < end; piece += step) {
            const int slot = all.slot(piece);
#pragma unroll
            for (int i = 0; i < Sums::kWords; ++i) {
                store_relaxed(out_at(slot, i), make_float4(none, none, none, none));
            }
            if (thread_ < 4) {
#pragma unroll
                for (int j = 0; j < Sums::kBlocks; ++j) {
                    store_relaxed(states_at(slot, j), make_float4(none, none, none, none));
                }
            }
        }
    }

  private:
    __device__ __forceinline__ float* slot_at(int slot) const {
        return partials_ + static_cast<int64_t>(slot) * Rows * kPartialFloatsOfRow;
    }
    __device__ __forceinline__ float* out_at(int slot, int i) const {
        return slot_at(slot) + (i * kMathThreads + thread_) * 4;
    }
    __device__ __forceinline__ float* states_at(int slot, int j) const {
        return slot_at(slot) + Rows * kHeadDim + (j * 4 + thread_ % 4) * 4;
    }
    __device__ __forceinline__ void load(int slot, Part& p) const {
#pragma unroll
        for (int i = 0; i < Sums::kWords; ++i) {
            p.out[i] = load_relaxed(out_at(slot, i));
        }
#pragma unroll
        for (int j = 0; j < Sums::kBlocks; ++j) {
            p.states[j] = load_relaxed(states_at(slot, j));
        }
    }
    __device__ static __forceinline__ bool is_written(float v) { return __float_as_uint(v) != kUnwritten; }
    __device__ static __forceinline__ bool is_written(const float4& v) {
        return is_written(v.x) && is_written(v.y) && is_written(v.z) && is_written(v.w);
    }
    // Arithmetic makes no NaN of these bits, but it may pass one on.
    __device__ static __forceinline__ float written(float v) {
        return is_written(v) ? v : __uint_as_float(0x7FFFFFFF);
    }
    __device__ static __forceinline__ float4 written(const float4& v) {
        return make_float4(written(v.x), written(v.y), written(v.z), written(v.w));
    }
    __device__ static __forceinline__ bool complete(const Part& p) {
        bool all = true;
#pragma unroll
        for (int i = 0; i < Sums::kWords; ++i) {
            all &= is_written(p.out[i]);
        }
#pragma unroll
        for (int j = 0; j < Sums::kBlocks; ++j) {
            all &= is_written(p.states[j]);
        }
        return all;
    }

    float* partials_;
    int thread_;
};

}  // namespace tessera::cuda

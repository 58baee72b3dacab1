// A row of logits held by a cluster of thread blocks: each warp owns a segment of the row in its block's
// shared memory, and what the warps find is written to every block, so that all decide alike after one
// barrier.
#pragma once

#include <cooperative_groups.h>

#include "ops/common/cuda/async_copy.cuh"
#include "ops/common/cuda/reduce.cuh"
#include "ops/sample/cuda/sample_row.cuh"

namespace tessera::cuda {

inline constexpr int kSampleCluster = 8;  // blocks of a row
inline constexpr int kSampleThreads = 320;
inline constexpr int kSampleWarps = kSampleThreads / kWarp;
inline constexpr int kSampleSegments = kSampleCluster * kSampleWarps;
// Up to this many best tokens are found through the segments' maxima; a cut further down takes the slow way.
inline constexpr int kSampleBestMax = 64;
inline constexpr int kSampleCandidatesMax = 256;
inline constexpr int kSampleBlockCandidatesMax = 64;  // of these from one block
inline constexpr int kSamplePass = 4 * kWarp;         // logits that a warp takes at once

inline constexpr int kSamplePassesMax =
    (kSampleCudaVocabMax + kSampleSegments * kSamplePass - 1) / (kSampleSegments * kSamplePass);

// The key of a segment without tokens, and of one with a NaN or +inf; others are ordered_bits().
inline constexpr uint32_t kSampleEmpty = 0;
inline constexpr uint32_t kSampleNotFinite = 0xFFFFFFFFu;

// ranked() tokens, best first, and the sums of the weights of the better ones. Both of the first block.
struct SampleSorted {
    uint64_t tokens[kSampleCandidatesMax];
    uint64_t before[kSampleCandidatesMax + 1];
};

struct __align__(16) SampleShared {
    uint32_t maxima[kSampleSegments];  // of each segment
    uint64_t barriers[kSampleWarps];
    uint64_t mass[kSampleSegments];
    double exp_sums[kSampleSegments];  // of the raw logits
    // ranked(), of each block, in any order; the first block's are used.
    uint64_t candidates[kSampleCluster][kSampleBlockCandidatesMax];
    union {
        SampleSorted sorted;
        // Weights of each pass over a warp's segment: where nothing is sorted.
        uint64_t passes[kSampleWarps][kSamplePassesMax];
    };
    uint64_t parts[2][kSampleCluster];  // of cluster_reduce()
    uint64_t reduce[kWarp];
    int32_t found[kSampleSegments];  // candidates of each segment
    int32_t candidate_count[2];      // of this block: of the raw and of the edited logits
    uint32_t kth;
    int32_t token;
    int32_t unfinished;
    SampleSlot slot;  // as it was before this launch
};

// What each thread of a row's cluster knows.
struct SampleRow {
    SampleShared& shared;
    cooperative_groups::cluster_group cluster;
    int64_t row = 0;
    int rank = 0;  // of the block
    int warp = 0;
    int lane = 0;
    float* x = nullptr;  // this warp's segment, padded with -inf to a multiple of 128
    int32_t first = 0;   // its first id
    int32_t count = 0;   // padded
    int parity = 0;

    __device__ int segment() const { return rank * kSampleWarps + warp; }

    // The variable of block `of`.
    template <typename T>
    __device__ T* remote(T* variable, int of) const {
        return cluster.map_shared_rank(variable, static_cast<unsigned>(of));
    }

    // Writes this warp's finding into every block's array. A cluster barrier follows.
    template <typename T>
    __device__ void publish(T (&array)[kSampleSegments], T value) const {
        if (lane < kSampleCluster) {
            *remote(&array[segment()], lane) = value;
        }
    }

    // f(values, offset in the segment) for each four neighbours of the segment, spread over the lanes.
    template <typename F>
    __device__ __forceinline__ void for_fours(F f) const {
        for (int32_t i = 4 * lane; i < count; i += 4 * kWarp) {
            f(*reinterpret_cast<float4*>(x + i), i);
        }
    }
    template <typename F>
    __device__ __forceinline__ void for_each(F f) const {
        for_fours([&](const float4& v, int32_t i) {
            f(v.x, first + i);
            f(v.y, first + i + 1);
            f(v.z, first + i + 2);
            f(v.w, first + i + 3);
        });
    }

    // Of all threads of the cluster; every thread gets it. 0 is the identity.
    template <typename Op>
    __device__ uint64_t cluster_reduce(uint64_t value, Op op) {
        const uint64_t mine = block_reduce(value, op, uint64_t{0}, shared.reduce);
        uint64_t* parts = shared.parts[parity];
        parity ^= 1;
        if (threadIdx.x < kSampleCluster) {
            *remote(parts + rank, static_cast<int>(threadIdx.x)) = mine;
        }
        cluster.sync();
        uint64_t all = 0;
        for (int b = 0; b < kSampleCluster; ++b) {
            all = op(all, parts[b]);
        }
        return all;
    }
};

// The k-th largest of the segments' maxima (1 <= k <= kSampleBestMax): at least k tokens are as large. For
// the whole block, four threads a segment.
__device__ inline uint32_t kth_maximum(SampleShared& shared, int k) {
    static_assert(kSampleThreads == 4 * kSampleSegments && kSampleSegments % 4 == 0);
    const int segment = static_cast<int>(threadIdx.x) / 4;
    const uint32_t mine = shared.maxima[segment];
    int better = 0;
#pragma unroll
    for (int i = 0; i < kSampleSegments / 4; ++i) {
        const int j = 4 * i + static_cast<int>(threadIdx.x) % 4;
        const uint32_t other = shared.maxima[j];
        better += other > mine || (other == mine && j < segment) ? 1 : 0;
    }
    if (warp_reduce<4>(better, Sum{}) == k - 1) {
        shared.kth = mine;
    }
    __syncthreads();
    return shared.kth;
}

// Of what publish() wrote for all segments; 0 is the identity. Every lane of a warp gets it.
template <typename T, typename Op>
__device__ __forceinline__ T reduce_segments(const T (&values)[kSampleSegments], int lane, Op op) {
    T all = 0;
    for (int j = lane; j < kSampleSegments; j += kWarp) {
        all = op(all, values[j]);
    }
    return warp_reduce(all, op);
}

// Appends a token to this block's list as far as there is room.
__device__ __forceinline__ void append_candidate(const SampleRow& row, int which, float x, int32_t id) {
    const int32_t place = atomicAdd(&row.shared.candidate_count[which], 1);
    if (place < kSampleBlockCandidatesMax) {
        *row.remote(&row.shared.candidates[row.rank][place], 0) = ranked(x, static_cast<uint32_t>(id));
    }
}

// How many candidates the blocks have found. Every lane of a warp calls this, and gets the same answer.
struct SampleFound {
    int32_t count = 0;  // of all
    int32_t mine = 0;   // lane b: of block b
    bool fits = false;  // all are in the list

    __device__ explicit SampleFound(const SampleRow& row) {
        for (int w = 0; w < kSampleWarps && row.lane < kSampleCluster; ++w) {
            mine += row.shared.found[row.lane * kSampleWarps + w];
        }
        count = warp_reduce(mine, Sum{});
        fits = count <= kSampleCandidatesMax && __all_sync(kFullWarp, mine <= kSampleBlockCandidatesMax) != 0;
    }
};

// Orders the candidates: best first, at ties the lowest id. For the whole first block.
__device__ inline void sort_candidates(const SampleRow& row, const SampleFound& found) {
    static_assert(kSampleCluster <= kSampleWarps);
    SampleSorted& sorted = row.shared.sorted;
    uint64_t* list = sorted.before;  // without gaps
    int32_t place = 0;
    for (int b = 0; b < kSampleCluster; ++b) {
        const int32_t of_block = __shfl_sync(kFullWarp, found.mine, b);
        for (int32_t i = row.lane; b == row.warp && i < of_block; i += kWarp) {
            list[place + i] = row.shared.candidates[b][i];
        }
        place += of_block;
    }
    __syncthreads();
    const int32_t quarter = row.lane % 4;  // four threads a candidate
    for (int32_t c0 = row.warp * (kWarp / 4); c0 < found.count; c0 += kSampleThreads / 4) {
        const int32_t c = c0 + row.lane / 4;
        const uint64_t mine = list[min(c, found.count - 1)];
        int32_t better = 0;
#pragma unroll 4
        for (int32_t j = quarter; j < found.count; j += 4) {
            better += list[j] > mine ? 1 : 0;
        }
        better = warp_reduce<4>(better, Sum{});
        if (c < found.count && quarter == 0) {
            sorted.tokens[better] = mine;
        }
    }
    __syncthreads();
}

}  // namespace tessera::cuda

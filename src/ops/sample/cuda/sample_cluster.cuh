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

struct SampleCandidate {
    uint32_t key = 0;  // ordered_bits()
    int32_t id = 0;
};

struct SampleShared {
    uint64_t barriers[kSampleWarps];
    uint64_t maxima[kSampleSegments];  // ranked(), of each segment; 0: it is empty; ~0: it has a NaN or +inf
    uint64_t mass[kSampleSegments];
    double exp_sums[kSampleSegments];                  // of the raw logits
    SampleCandidate candidates[kSampleCandidatesMax];  // the first block's are used, in any order
    SampleCandidate sorted[kSampleCandidatesMax];      // best first
    uint64_t before[kSampleCandidatesMax + 1];         // sums of the weights of the better ones
    uint64_t parts[2][kSampleCluster];                 // of cluster_reduce()
    uint64_t reduce[kWarp];
    uint64_t kth;
    int32_t found[kSampleSegments];  // candidates of each segment
    int32_t candidate_count[2];      // of the raw and of the edited logits
    int32_t token;
    int32_t unfinished;
};

// What each thread of a row's cluster knows.
struct SampleRow {
    SampleShared& shared;
    cooperative_groups::cluster_group cluster;
    int64_t row = 0;
    int rank = 0;  // of the block
    int warp = 0;
    int lane = 0;
    float* x = nullptr;  // this warp's segment, padded with -inf to a multiple of 4
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
    __device__ void for_fours(F f) const {
        for (int32_t i = 4 * lane; i < count; i += 4 * kWarp) {
            f(*reinterpret_cast<float4*>(x + i), i);
        }
    }
    template <typename F>
    __device__ void for_each(F f) const {
        for_fours([&](float4 v, int32_t i) {
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

// The k-th largest of the segments' maxima (k >= 1): at least k tokens rank as high. For the whole block.
__device__ inline uint64_t kth_maximum(SampleShared& shared, int k) {
    const int t = static_cast<int>(threadIdx.x);
    if (t < kSampleSegments) {
        const uint64_t mine = shared.maxima[t];
        int better = 0;
        for (int j = 0; j < kSampleSegments; ++j) {
            better += shared.maxima[j] > mine || (shared.maxima[j] == mine && j < t) ? 1 : 0;
        }
        if (better == k - 1) {
            shared.kth = mine;
        }
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

// Appends the segment's tokens for which keep(value, id) holds to the first block's list as far as there is
// room, and publishes how many they are. A cluster barrier follows.
template <typename Keep>
__device__ inline void collect(const SampleRow& row, int which, bool any, Keep keep) {
    SampleShared& first = *row.remote(&row.shared, 0);
    int32_t found = 0;
    if (any) {
        row.for_each([&](float x, int32_t id) {
            if (x > minus_infinity() && keep(x, id)) {
                ++found;
                const int32_t place = atomicAdd(&first.candidate_count[which], 1);
                if (place < kSampleCandidatesMax) {
                    first.candidates[place] = {ordered_bits(x), id};
                }
            }
        });
    }
    row.publish(row.shared.found, warp_reduce(found, Sum{}));
}

// Orders the first `count` candidates: best first, at ties the lowest id. For the whole first block.
__device__ inline void sort_candidates(SampleShared& shared, int32_t count) {
    const auto t = static_cast<int32_t>(threadIdx.x);
    if (t < count) {
        const SampleCandidate mine = shared.candidates[t];
        int32_t better = 0;
        for (int32_t j = 0; j < count; ++j) {
            const SampleCandidate other = shared.candidates[j];
            better += other.key > mine.key || (other.key == mine.key && other.id < mine.id) ? 1 : 0;
        }
        shared.sorted[better] = mine;
    }
    __syncthreads();
}

}  // namespace tessera::cuda

// The experts that a few tokens chose, each once, and the tokens of each: found by looking at all choices.
#pragma once

#include <cstdint>

#include "ops/common/cuda/reduce.cuh"

namespace tessera::cuda {

inline constexpr int kFewTokens = 8;  // columns of an instruction
inline constexpr int kFewPairs = 64;

struct FewRouting {
    const int32_t* chosen = nullptr;  // [tokens, k]
    int32_t tokens = 0;
    int32_t k = 0;
    int32_t experts = 0;
    bool shared = false;  // the first entry is the shared expert
};

// The experts of the batch, each once; the shared one first. A column is a row of act.
struct FewEntries {
    int32_t count;
    int32_t expert[kFewPairs + 1];
    int8_t columns[kFewPairs + 1][kFewTokens];  // -1: none
};
struct FewEntriesScratch {
    int32_t choices[kFewPairs];  // -1: none. To be read after the caller has synchronised
    uint32_t firsts[2];
};

// Of a pair; -1: none.
__device__ __forceinline__ int32_t few_choice(const FewRouting& routing, int pair) {
    const int32_t expert = pair < routing.tokens * routing.k ? routing.chosen[pair] : -1;
    return expert < routing.experts ? expert : -1;
}

// By all threads, at least 64, of which the first 64 have the pairs' choices. The caller synchronises.
__device__ __forceinline__ void find_entries(const FewRouting& routing, int32_t choice, FewEntries& entries,
                                             FewEntriesScratch& scratch) {
    const int thread = static_cast<int>(threadIdx.x);
    const int pairs = routing.tokens * routing.k;
    const int shared = routing.shared ? 1 : 0;
    const int expert = thread < kFewPairs ? choice : -1;
    for (int i = thread; i < (kFewPairs + 1) * kFewTokens; i += static_cast<int>(blockDim.x)) {
        const bool token = shared != 0 && i < routing.tokens;
        (&entries.columns[0][0])[i] = static_cast<int8_t>(token ? pairs + i : -1);
    }
    if (thread < kFewPairs) {
        scratch.choices[thread] = expert;
    }
    __syncthreads();
    uint64_t same = 0;
    int first = 0;
    if (thread < kFewPairs) {
#pragma unroll 8
        for (int i = 0; i < pairs; ++i) {
            same |= static_cast<uint64_t>(scratch.choices[i] == expert) << i;
        }
        first = __ffsll(static_cast<int64_t>(same)) - 1;
        const uint32_t ballot = __ballot_sync(0xFFFFFFFFu, expert >= 0 && first == thread);
        if (thread % 32 == 0) {
            scratch.firsts[thread / 32] = ballot;
        }
    }
    __syncthreads();
    const uint64_t all = scratch.firsts[0] | static_cast<uint64_t>(scratch.firsts[1]) << 32;
    if (thread == 0) {
        entries.count = shared + __popcll(all);
        if (shared != 0) {  // else entry 0 may be another thread's
            entries.expert[0] = 0;
        }
    }
    if (expert >= 0) {
        const int entry = shared + __popcll(all & ((uint64_t{1} << first) - 1));
        const int rank = __popcll(same & ((uint64_t{1} << thread) - 1));
        if (rank < kFewTokens) {
            entries.columns[entry][rank] = static_cast<int8_t>(thread);
        }
        if (first == thread) {
            entries.expert[entry] = expert;
        }
    }
}

// What a warp finds by itself, without the others: the number of entries, and an entry's expert.
class FewExperts {
  public:
    __device__ __forceinline__ explicit FewExperts(const FewRouting& routing) {
        const auto lane = static_cast<int>(threadIdx.x % 32);
        const int shared = routing.shared ? 1 : 0;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            choices_[i] = few_choice(routing, lane + 32 * i);
        }
        bool first = is_first(choices_[0]) && choices_[0] >= 0;
        const uint32_t low = __ballot_sync(kFullWarp, first);
        entries_[0] = first ? shared + __popc(low & ((1u << lane) - 1)) : -1;
        count_ = shared + __popc(low);
        if (routing.tokens * routing.k > 32) {
            first = is_first(choices_[1]) && choices_[1] >= 0;
#pragma unroll 8
            for (int i = 0; i < 32; ++i) {
                first &= __shfl_sync(kFullWarp, choices_[0], i) != choices_[1];
            }
            const uint32_t high = __ballot_sync(kFullWarp, first);
            entries_[1] = first ? count_ + __popc(high & ((1u << lane) - 1)) : -1;
            count_ += __popc(high);
        }
    }
    __device__ __forceinline__ int count() const { return count_; }
    // Of pair lane + 32 * half; -1: none.
    __device__ __forceinline__ int choice(int half) const { return choices_[half]; }
    // By all lanes; not of the shared expert.
    __device__ __forceinline__ int expert(int entry) const {
        const uint32_t low = __ballot_sync(kFullWarp, entries_[0] == entry);
        const uint32_t high = __ballot_sync(kFullWarp, entries_[1] == entry);
        return low != 0 ? __shfl_sync(kFullWarp, choices_[0], __ffs(static_cast<int>(low)) - 1)
                        : __shfl_sync(kFullWarp, choices_[1], __ffs(static_cast<int>(high)) - 1);
    }

  private:
    // Of the lanes with the same choice.
    static __device__ __forceinline__ bool is_first(int choice) {
        const uint32_t same = __match_any_sync(kFullWarp, choice);
        return (same & ((1u << threadIdx.x % 32) - 1)) == 0;
    }

    int choices_[2];
    int entries_[2] = {-1, -1};  // of which the pair is the first
    int count_;
};

}  // namespace tessera::cuda

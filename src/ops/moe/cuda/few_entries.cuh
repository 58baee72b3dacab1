// The experts that a few tokens chose, each once, and the tokens of each: found by looking at all choices.
#pragma once

#include <cstdint>

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

// By all threads, at least 64. The caller synchronises.
__device__ __forceinline__ void find_entries(const FewRouting& routing, FewEntries& entries,
                                             FewEntriesScratch& scratch) {
    const int thread = static_cast<int>(threadIdx.x);
    const int pairs = routing.tokens * routing.k;
    const int shared = routing.shared ? 1 : 0;
    int expert = -1;
    if (thread < kFewPairs) {
        expert = thread < pairs ? routing.chosen[thread] : -1;
        expert = expert < routing.experts ? expert : -1;
    }
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
        entries.expert[0] = 0;
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

}  // namespace tessera::cuda

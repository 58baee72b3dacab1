// What the kernels of narrow experts have in common.
#pragma once

#include <cstdint>

namespace tessera::cuda {

inline constexpr int kNarrowWidth = 192;      // of an expert: the only one
inline constexpr int kNarrowPairsMax = 8192;  // tokens * k
inline constexpr int kNarrowItemsMax = 24;    // of a cluster

// Of a call: what the kernels are asked whether they serve it.
struct NarrowSizes {
    int64_t tokens = 0;
    int64_t k = 0;
    int64_t experts = 0;
    int64_t width = 0;
    int64_t hidden = 0;
};

// What the clusters' shares depend on.
struct NarrowChoices {
    const int32_t* chosen = nullptr;  // [pairs]
    int32_t pairs = 0;                // tokens * k
    int32_t experts = 0;
    int32_t shared_tokens = 0;  // of one more expert, number `experts`, which has all tokens; 0: none
};

}  // namespace tessera::cuda

// Taking over the cache lines of a result that another thread wrote last. Between the cores of a large
// machine that takes longer than the stores themselves, so the kernels ask for the lines before they compute.
#pragma once

#include <cstdint>

namespace tessera {

// Rows of a block of results that are asked for: many more lines than a core can wait for at once stall it.
inline constexpr int64_t kOwnRowsMax = 32;

// Asks for `count` floats from `data` on, to be written soon. Changes nothing.
inline void own_lines([[maybe_unused]] const float* data, [[maybe_unused]] int64_t count) {
#if defined(__x86_64__)
    // Not __builtin_prefetch: for the baseline instruction set that only asks for a copy to read.
    for (int64_t i = 0; i < count; i += 16) {
        asm volatile("prefetchw %0" : : "m"(data[i]));
    }
#endif
}

}  // namespace tessera

// The SIMD targets of this build, and how tests and benchmarks force one of them. Highway compiles every
// operator for each; without force_simd() the best one that the processor has is used.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

namespace tessera {

struct SimdVariant {
    std::string_view name;       // "avx512", "avx2", "reference"
    std::string_view requires_;  // instruction sets, "" for none
    int64_t target = 0;          // Highway's
    bool supported = false;      // by this processor
};

// Best first; the last one is the plain reference, which every processor runs.
std::vector<SimdVariant> simd_variants();
// Not for use while operators run. 0 = the best again.
void force_simd(int64_t target);

}  // namespace tessera

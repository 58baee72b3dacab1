#include "ops/harness_simd.h"

// clang-format off: simd_targets.h must come before Highway.
#include "ops/common/simd_targets.h"
#include <hwy/highway.h>
#include <hwy/targets.h>
// clang-format on

namespace tessera {

std::vector<SimdVariant> simd_variants() {
    std::vector<SimdVariant> variants = {
        {"avx512", "avx512f, avx512bw, avx512cd, avx512dq, avx512vl", HWY_AVX3, false},
        {"avx2", "avx2, bmi2, f16c, fma", HWY_AVX2, false},
        {"reference", "", HWY_SCALAR, true},
    };
    for (SimdVariant& variant : variants) {
        variant.supported = variant.supported || (hwy::SupportedTargets() & variant.target) != 0;
    }
    return variants;
}

void force_simd(int64_t target) {
    hwy::SetSupportedTargetsForTest(target);
}

}  // namespace tessera

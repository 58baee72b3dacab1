#include "ops/harness_simd.h"

// clang-format off: simd_targets.h must come before Highway.
#include "ops/common/simd_targets.h"
#include <hwy/highway.h>
#include <hwy/targets.h>
// clang-format on

namespace tessera {

namespace {

// Asked before any target is forced: afterwards Highway reports the forced one alone.
int64_t processor_targets() {
    static const int64_t targets = hwy::SupportedTargets();
    return targets;
}

}  // namespace

std::vector<SimdVariant> simd_variants() {
    std::vector<SimdVariant> variants = {
        {"avx512", "avx512f, avx512bw, avx512cd, avx512dq, avx512vl", HWY_AVX3, false},
        {"avx2", "avx2, bmi2, f16c, fma", HWY_AVX2, false},
        {"reference", "", HWY_SCALAR, true},
    };
    for (SimdVariant& variant : variants) {
        variant.supported = variant.supported || (processor_targets() & variant.target) != 0;
    }
    return variants;
}

void force_simd(int64_t target) {
    processor_targets();
    hwy::SetSupportedTargetsForTest(target);
}

}  // namespace tessera

// The instruction sets that SIMD code is compiled for: AVX2 and AVX-512, chosen at run time, and Highway's
// one-lane target, in which the operators call their references instead. Include before <hwy/highway.h>.
//
// Both SIMD targets have a fused multiply-add and IEEE division, and every sum has an order of its own that
// no vector width changes; so all targets and the references give the same bits.
#pragma once

#define HWY_DISABLED_TARGETS (HWY_SSSE3 | HWY_SSE4 | HWY_AVX3_DL)

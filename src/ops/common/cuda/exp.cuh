// exp, sigmoid and silu on the device: the operations of ops/common/exp.h, one by one, so that the CPU and
// the device give the same bits.
#pragma once

#include <cstdint>

#include "ops/common/exp.h"

namespace tessera::cuda {

// ops/common/exp.h's, without a branch: several are computed side by side. A NaN may become another.
__device__ __forceinline__ float exp_f32(float x) {
    using C = ExpConstants;
    x = C::kMin > x ? C::kMin : x;
    x = C::kMax < x ? C::kMax : x;
    const float shifted = fmaf(x, C::kLog2E, C::kRound);
    const float n = __fsub_rn(shifted, C::kRound);
    const int32_t exponent = __float_as_int(shifted) - __float_as_int(C::kRound);
    float r = fmaf(n, -C::kLn2High, x);
    r = fmaf(n, -C::kLn2Low, r);
    constexpr float k0 = C::kPoly[0], k1 = C::kPoly[1], k2 = C::kPoly[2], k3 = C::kPoly[3];
    constexpr float k4 = C::kPoly[4], k5 = C::kPoly[5], k6 = C::kPoly[6], k7 = C::kPoly[7];
    static_assert(C::kDegree == 7);
    float p = fmaf(k7, r, k6);
    p = fmaf(p, r, k5);
    p = fmaf(p, r, k4);
    p = fmaf(p, r, k3);
    p = fmaf(p, r, k2);
    p = fmaf(p, r, k1);
    p = fmaf(p, r, k0);
    const int32_t half = exponent >> 1;
    const float scale_a = __int_as_float((half + 127) << 23);
    const float scale_b = __int_as_float((exponent - half + 127) << 23);
    return __fmul_rn(__fmul_rn(p, scale_a), scale_b);
}

// Divisors of 1 and more and their quotients side by side: what the hardware's own estimate can begin takes
// four multiply-adds, and one branch for all leads to what it cannot.
template <int Count>
struct SigmoidQuotients {
    float below[Count];    // 1 + exp(-x)
    float inverse[Count];  // of `below`, nearly
    float largest = 0;

    __device__ __forceinline__ explicit SigmoidQuotients(const float (&x)[Count]) {
#pragma unroll
        for (int i = 0; i < Count; ++i) {
            below[i] = __fadd_rn(1.0f, exp_f32(-x[i]));
            largest = fmaxf(largest, below[i]);
            float rough;
            asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(rough) : "f"(below[i]));
            inverse[i] = fmaf(fmaf(-below[i], rough, 1.0f), rough, rough);
        }
    }
    // value / below[i], rounded as the division is, for finite values of 2^-100 and more.
    __device__ __forceinline__ float divide(float value, int i) const {
        const float quotient = __fmul_rn(value, inverse[i]);
        return fmaf(fmaf(-below[i], quotient, value), inverse[i], quotient);
    }
    __device__ __forceinline__ bool far() const { return !(largest < 0x1p+100f); }
};

// ops/common/exp.h's sigmoid_f32() of several.
template <int Count>
__device__ __forceinline__ void sigmoid_f32(const float (&x)[Count], float (&y)[Count]) {
    const SigmoidQuotients<Count> quotients(x);
#pragma unroll
    for (int i = 0; i < Count; ++i) {
        y[i] = quotients.divide(1, i);
    }
    if (quotients.far()) {
#pragma unroll
        for (int i = 0; i < Count; ++i) {
            y[i] = __fdiv_rn(1.0f, quotients.below[i]);
        }
    }
}
// Its silu_f32() of several.
template <int Count>
__device__ __forceinline__ void silu_f32(const float (&x)[Count], float (&y)[Count]) {
    const SigmoidQuotients<Count> quotients(x);
    float smallest = 1;
    float largest = 0;
#pragma unroll
    for (int i = 0; i < Count; ++i) {
        y[i] = quotients.divide(x[i], i);
        smallest = fminf(smallest, fabsf(x[i]));
        largest = fmaxf(largest, fabsf(x[i]));
    }
    if (quotients.far() || smallest < 0x1p-100f || largest > 0x1p+126f) {
#pragma unroll
        for (int i = 0; i < Count; ++i) {
            y[i] = __fdiv_rn(x[i], quotients.below[i]);
        }
    }
}

}  // namespace tessera::cuda

// Two float16 in a register, the first in the low half: what the device does with both in one instruction.
#pragma once

#include <cstdint>

namespace tessera::cuda {

__device__ __forceinline__ uint32_t half2_from(float low, float high) {
    uint32_t packed;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    return packed;
}
__device__ __forceinline__ float half2_low(uint32_t x) {
    float low;
    asm("{\n.reg .b16 l, h;\nmov.b32 {l, h}, %1;\ncvt.f32.f16 %0, l;\n}" : "=f"(low) : "r"(x));
    return low;
}
__device__ __forceinline__ float half2_high(uint32_t x) {
    float high;
    asm("{\n.reg .b16 l, h;\nmov.b32 {l, h}, %1;\ncvt.f32.f16 %0, h;\n}" : "=f"(high) : "r"(x));
    return high;
}

__device__ __forceinline__ uint32_t half2_max(uint32_t a, uint32_t b) {
    uint32_t c;
    asm("max.f16x2 %0, %1, %2;" : "=r"(c) : "r"(a), "r"(b));
    return c;
}
__device__ __forceinline__ uint32_t half2_multiply(uint32_t a, uint32_t b) {
    uint32_t c;
    asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(c) : "r"(a), "r"(b));
    return c;
}
__device__ __forceinline__ uint32_t half2_fma(uint32_t a, uint32_t b, uint32_t c) {
    uint32_t d;
    asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    return d;
}
// 2^x, relative error 2^-9.9; 0 for -infinity. The unit takes one at a time; put together here by a
// multiply-add, which is not so busy as the unit that permutes bytes, and which the compiler does only once.
__device__ __forceinline__ uint32_t half2_exp2(uint32_t a) {
    uint32_t c;
    asm("{\n.reg .b16 l, h;\n.reg .b32 x, y;\nmov.b32 {l, h}, %1;\nex2.approx.f16 l, l;\nex2.approx.f16 h, "
        "h;\n"
        "cvt.u32.u16 x, l;\ncvt.u32.u16 y, h;\nmad.lo.u32 %0, y, 65536, x;\n}"
        : "=r"(c)
        : "r"(a));
    return c;
}
// 2^x for x < 15.5, by multiply-adds in place of that unit: relative error 2^-8; no less than 2^-12, also for
// NaN.
__device__ __forceinline__ uint32_t half2_exp2_by_adding(uint32_t x) {
    constexpr uint32_t kLeast = 0xCA00CA00;    // -12
    constexpr uint32_t kInteger = 0x660F660F;  // 1551 + n: its low bits are n + 15, the exponent of 2^n
    uint32_t y;
    asm("{\n.reg .b32 a, n, f, p;\nmax.f16x2 a, %1, %2;\nadd.rn.f16x2 n, a, %3;\nsub.rn.f16x2 f, n, %3;\n"
        "sub.rn.f16x2 f, a, f;\nfma.rn.f16x2 p, f, %4, %5;\nfma.rn.f16x2 p, f, p, %6;\n"
        "shl.b32 n, n, 10;\nand.b32 n, n, 0x7C007C00;\nmul.rn.f16x2 %0, p, n;\n}"
        : "=r"(y)
        : "r"(x), "r"(kLeast), "r"(kInteger), "r"(0x33BF33BFu), "r"(0x39A139A1u), "r"(0x3C003C00u));
    return y;
}
// Whether a's low half is greater than b's, or its high half.
__device__ __forceinline__ bool half2_any_greater(uint32_t a, uint32_t b) {
    uint32_t any;
    asm("{\n.reg .pred p, q;\nsetp.gt.f16x2 p|q, %1, %2;\nor.pred p, p, q;\nselp.u32 %0, 1, 0, p;\n}"
        : "=r"(any)
        : "r"(a), "r"(b));
    return any != 0;
}
// Four e4m3, saturating at 448; a's low half in the low byte.
__device__ __forceinline__ uint32_t pack_e4m3x4(uint32_t a, uint32_t b) {
    uint32_t packed;
    asm("{\n.reg .b16 l, h;\ncvt.rn.satfinite.e4m3x2.f16x2 l, %1;\ncvt.rn.satfinite.e4m3x2.f16x2 h, %2;\n"
        "mov.b32 %0, {l, h};\n}"
        : "=r"(packed)
        : "r"(a), "r"(b));
    return packed;
}

}  // namespace tessera::cuda

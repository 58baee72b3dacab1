// Conversions between float32 and the narrow formats on the device, and vectors of eight bfloat16 (16 bytes).
// All round to nearest even; fp8 saturates at 448. They give the bits of ops/common/half.h, NaN payloads
// aside.
#pragma once

#include <cstdint>

#include <cuda_bf16.h>
#include <cuda_fp8.h>

namespace tessera::cuda {

// The value of x rounded to bfloat16, as float32: for the places where the reference model rounds.
__device__ __forceinline__ float round_bf16(float x) {
    return __bfloat162float(__float2bfloat16_rn(x));
}

__device__ __forceinline__ uint32_t pack_bf16(float low, float high) {
    uint32_t packed;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(packed) : "f"(high), "f"(low));
    return packed;
}
__device__ __forceinline__ float low_bf16(uint32_t packed) {
    return __uint_as_float(packed << 16);
}
__device__ __forceinline__ float high_bf16(uint32_t packed) {
    return __uint_as_float(packed & 0xFFFF0000u);
}

// Two e4m3 values, low in the low byte.
__device__ __forceinline__ uint16_t pack_e4m3(float low, float high) {
    uint16_t packed;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(packed) : "f"(high), "f"(low));
    return packed;
}
__device__ __forceinline__ uint32_t pack_e4m3x4(float a, float b, float c, float d) {
    return pack_e4m3(a, b) | static_cast<uint32_t>(pack_e4m3(c, d)) << 16;
}
// Two e4m3 values to two of float16 (exact), side by side.
__device__ __forceinline__ uint32_t halves_of_e4m3(uint16_t packed) {
    uint32_t halves;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(packed));
    return halves;
}
// Two e4m3 values to two floats (exact).
__device__ __forceinline__ float2 unpack_e4m3(uint16_t packed) {
    const uint32_t halves = halves_of_e4m3(packed);
    return __half22float2(*reinterpret_cast<const __half2*>(&halves));
}

// value / scale, rounded as the division is (finite quotients), for many values and one scale: three
// operations in place of eight.
struct Divider {
    float scale;
    float inverse;  // 1 / scale, rounded

    __device__ __forceinline__ float operator()(float value) const {
        const float quotient = __fmul_rn(value, inverse);
        return fmaf(fmaf(-quotient, scale, value), inverse, quotient);
    }
    // The same for e4m3 where the quotient may overflow: what saturates anyway need not be exact.
    __device__ __forceinline__ float for_e4m3(float value) const {
        const float rough = __fmul_rn(value, inverse);
        return fabsf(rough) < 1000 ? fmaf(fmaf(-rough, scale, value), inverse, rough) : rough;
    }
};
__device__ __forceinline__ Divider divider(float scale) {
    return {scale, __fdiv_rn(1.0f, scale)};
}

__device__ __forceinline__ void unpack_bf16x8(uint4 raw, float (&to)[8]) {
    const uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        to[2 * i] = low_bf16(words[i]);
        to[2 * i + 1] = high_bf16(words[i]);
    }
}
__device__ __forceinline__ uint4 pack_bf16x8(const float (&from)[8]) {
    return make_uint4(pack_bf16(from[0], from[1]), pack_bf16(from[2], from[3]), pack_bf16(from[4], from[5]),
                      pack_bf16(from[6], from[7]));
}

// Products of two bfloat16, each rounded to bfloat16.
__device__ __forceinline__ uint32_t multiply_bf16x2(uint32_t a, uint32_t b) {
    uint32_t product;
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
    return product;
}
__device__ __forceinline__ uint4 multiply_bf16x8(uint4 a, uint4 b) {
    return make_uint4(multiply_bf16x2(a.x, b.x), multiply_bf16x2(a.y, b.y), multiply_bf16x2(a.z, b.z),
                      multiply_bf16x2(a.w, b.w));
}

// Eight bfloat16 as float32. The address is 16-byte aligned.
__device__ __forceinline__ void load_bf16x8(const __nv_bfloat16* from, float (&to)[8]) {
    unpack_bf16x8(*reinterpret_cast<const uint4*>(from), to);
}
__device__ __forceinline__ void store_bf16x8(const float (&from)[8], __nv_bfloat16* to) {
    *reinterpret_cast<uint4*>(to) = pack_bf16x8(from);
}

}  // namespace tessera::cuda

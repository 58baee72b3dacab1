// Accesses to words in device memory that blocks of one launch hand each other, each of which tells by itself
// whether it is there: seen by every block, in no order, written and read as a whole.
#pragma once

#include <cstdint>

namespace tessera::cuda {

__device__ __forceinline__ uint32_t load_relaxed(const uint32_t* from) {
    uint32_t value;
    asm volatile("ld.relaxed.gpu.global.u32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
    return value;
}
__device__ __forceinline__ uint4 load_relaxed_16(const void* from) {
    uint4 v;
    asm volatile("ld.relaxed.gpu.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "l"(from)
                 : "memory");
    return v;
}
__device__ __forceinline__ float4 load_relaxed_4(const float* from) {
    float4 v;
    asm volatile("ld.relaxed.gpu.global.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
                 : "l"(from)
                 : "memory");
    return v;
}
__device__ __forceinline__ float2 load_relaxed_2(const float* from) {
    float2 v;
    asm volatile("ld.relaxed.gpu.global.v2.f32 {%0, %1}, [%2];"
                 : "=f"(v.x), "=f"(v.y)
                 : "l"(from)
                 : "memory");
    return v;
}

__device__ __forceinline__ void store_relaxed(void* to, uint32_t value) {
    asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(to), "r"(value) : "memory");
}
__device__ __forceinline__ void store_relaxed_half(uint16_t* to, uint16_t value) {
    asm volatile("st.relaxed.gpu.global.u16 [%0], %1;" ::"l"(to), "h"(value) : "memory");
}
__device__ __forceinline__ void store_relaxed_byte(uint8_t* to, uint32_t value) {
    asm volatile("st.relaxed.gpu.global.u8 [%0], %1;" ::"l"(to), "r"(value) : "memory");
}
__device__ __forceinline__ void store_relaxed(void* to, const uint4& v) {
    asm volatile("st.relaxed.gpu.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(to), "r"(v.x), "r"(v.y),
                 "r"(v.z), "r"(v.w)
                 : "memory");
}
__device__ __forceinline__ void store_relaxed(void* to, const float4& v) {
    asm volatile("st.relaxed.gpu.global.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(v.x), "f"(v.y),
                 "f"(v.z), "f"(v.w)
                 : "memory");
}
__device__ __forceinline__ void store_relaxed(void* to, const float2& v) {
    asm volatile("st.relaxed.gpu.global.v2.f32 [%0], {%1, %2};" ::"l"(to), "f"(v.x), "f"(v.y) : "memory");
}

}  // namespace tessera::cuda

// Floats as unsigned integers of the same order, and (value, index) pairs in one word, for selections.
#pragma once

#include <cstdint>

namespace tessera::cuda {

// a < b exactly when ordered_bits(a) < ordered_bits(b); both zeros are one; a positive NaN is above
// everything.
__device__ __forceinline__ uint32_t ordered_bits(float value) {
    const uint32_t bits = __float_as_uint(value == 0.0f ? 0.0f : value);
    return (bits & 0x80000000u) != 0 ? ~bits : bits | 0x80000000u;
}
__device__ __forceinline__ float from_ordered_bits(uint32_t bits) {
    return __uint_as_float((bits & 0x80000000u) != 0 ? bits ^ 0x80000000u : ~bits);
}

// The largest ranked() is the largest value, at ties the lowest index. No value ranks as 0.
__device__ __forceinline__ uint64_t ranked(float value, uint32_t index) {
    return static_cast<uint64_t>(ordered_bits(value)) << 32 | (0xFFFFFFFFu - index);
}
__device__ __forceinline__ float ranked_value(uint64_t rank) {
    return from_ordered_bits(static_cast<uint32_t>(rank >> 32));
}
__device__ __forceinline__ int32_t ranked_index(uint64_t rank) {
    return static_cast<int32_t>(0xFFFFFFFFu - static_cast<uint32_t>(rank));
}

}  // namespace tessera::cuda

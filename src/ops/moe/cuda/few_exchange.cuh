// How the blocks of one launch hand act to each other.
//
// Act needs no flag and no fence: a word is valid once it differs from kFewUnwritten, which no results are
// (few_one.cuh: a byte, once it differs from 0xFF; few_one_w4.cuh: half a word). Two areas take turns; each
// call marks the other one's words again. All blocks of a launch are resident, and a block has stored all of
// its act before it waits for any, so none waits forever.
#pragma once

#include <cstdint>

#include "ops/common/cuda/relaxed.cuh"

namespace tessera::cuda {

inline constexpr int kFewActBytes = 256 << 10;
// Conversions to bfloat16 and e4m3 give 0x7FFF and 0x7F for what is no number.
inline constexpr uint32_t kFewUnwritten = 0xFFFFFFFF;

// All bytes are 0xFF before the first call of all.
struct FewExchange {
    uint8_t act[2][kFewActBytes];
    uint32_t arrivals;  // less one, modulo those of two calls
};

inline constexpr int64_t kFewExchangeBytes = (sizeof(FewExchange) + 255) / 256 * 256;

// The area of this call. Called `arrivals` times by each launch, the same number in every launch that shares
// the exchange: two a multiprocessor with fp8, one with int4.
__device__ __forceinline__ uint32_t few_turn(FewExchange* exchange, uint32_t arrivals) {
    const uint32_t before = atomicInc(&exchange->arrivals, 2 * arrivals - 1);
    return (before + 1) / arrivals & 1;
}
// By one thread of each block.
__device__ __forceinline__ uint32_t few_turn(FewExchange* exchange) {
    return few_turn(exchange, gridDim.x);
}
// What the next call finds. By all threads of all blocks.
__device__ __forceinline__ void few_reset(FewExchange* exchange, uint32_t turn) {
    uint8_t* area = exchange->act[turn];
    constexpr uint4 kMarks = {kFewUnwritten, kFewUnwritten, kFewUnwritten, kFewUnwritten};
    for (auto i = blockIdx.x * blockDim.x + threadIdx.x; i < kFewActBytes / sizeof(uint4);
         i += gridDim.x * blockDim.x) {
        reinterpret_cast<uint4*>(area)[i] = kMarks;
    }
}
__device__ __forceinline__ bool few_missing(uint4 v) {
    return max(max(v.x, v.y), max(v.z, v.w)) == kFewUnwritten;
}

}  // namespace tessera::cuda

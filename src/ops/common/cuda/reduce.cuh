// Reductions over a warp and over a block, in a fixed order: the same bits for the same inputs.
#pragma once

#include <cstdint>

namespace tessera::cuda {

inline constexpr uint32_t kFullWarp = 0xFFFFFFFFu;
inline constexpr int kWarp = 32;

struct Sum {
    template <typename T>
    __device__ __forceinline__ T operator()(T a, T b) const {
        return a + b;
    }
};
struct Max {
    template <typename T>
    __device__ __forceinline__ T operator()(T a, T b) const {
        return a > b ? a : b;
    }
};

// Every lane gets the result. Lanes = a power of two: groups of neighbouring lanes reduce on their own.
template <int Lanes = kWarp, typename T, typename Op>
__device__ __forceinline__ T warp_reduce(T value, Op op) {
#pragma unroll
    for (int offset = Lanes / 2; offset > 0; offset /= 2) {
        value = op(value, __shfl_xor_sync(kFullWarp, value, offset));
    }
    return value;
}

// The sum over the warp, of values below 2^43: two reductions of the hardware's 32 bits, not five steps
// of 64.
__device__ __forceinline__ uint64_t warp_sum(uint64_t value) {
    return (uint64_t{__reduce_add_sync(kFullWarp, static_cast<uint32_t>(value >> 16))} << 16) +
           __reduce_add_sync(kFullWarp, static_cast<uint32_t>(value) & 0xFFFF);
}

// Every thread gets the result. `shared` has one T for each warp of the block (at most 32). All threads of
// the block take part; blockDim.x is a multiple of 32. Ends with a barrier, so `shared` may be used again at
// once.
template <typename T, typename Op>
__device__ __forceinline__ T block_reduce(T value, Op op, T identity, T* shared) {
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
    const int warp = static_cast<int>(threadIdx.x) / kWarp;
    const int warps = static_cast<int>(blockDim.x) / kWarp;
    value = warp_reduce(value, op);
    if (lane == 0) {
        shared[warp] = value;
    }
    __syncthreads();
    value = warp_reduce(lane < warps ? shared[lane] : identity, op);
    __syncthreads();
    return value;
}

}  // namespace tessera::cuda

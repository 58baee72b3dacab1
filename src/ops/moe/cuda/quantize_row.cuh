// A row of bfloat16 to e4m3 with a scale of its own.
#pragma once

#include <cstdint>

#include <cuda_bf16.h>

#include "ops/common/cuda/convert.cuh"
#include "ops/moe/cuda/few_exchange.cuh"

namespace tessera::cuda {

struct QuantizeRow {
    const uint16_t* from = nullptr;  // [count] bfloat16, 16-byte aligned
    uint8_t* to = nullptr;           // [count]
    float* scale = nullptr;          // its largest magnitude / 448
    int count = 0;                   // a multiple of 8
};

__device__ __forceinline__ uint2 quantize_eight(uint4 raw, const Divider& divide) {
    float v[8];
    unpack_bf16x8(raw, v);
    return make_uint2(pack_e4m3x4(divide(v[0]), divide(v[1]), divide(v[2]), divide(v[3])),
                      pack_e4m3x4(divide(v[4]), divide(v[5]), divide(v[6]), divide(v[7])));
}

// The larger magnitudes of two pairs of bfloat16; no NaN.
__device__ __forceinline__ uint32_t larger_bf16x2(uint32_t a, uint32_t b) {
    uint32_t most;
    asm("max.bf16x2 %0, %1, %2;" : "=r"(most) : "r"(a), "r"(b & 0x7FFF7FFFu));
    return most;
}
__device__ __forceinline__ uint32_t larger_bf16x2(uint32_t most, uint4 raw) {
    most = larger_bf16x2(most, raw.x);
    most = larger_bf16x2(most, raw.y);
    most = larger_bf16x2(most, raw.z);
    return larger_bf16x2(most, raw.w);
}

__device__ __forceinline__ float row_scale(float largest) {
    return __fdiv_rn(fmaxf(largest, 1e-12f), 448.0f);
}

// Eight-element pieces of a row that a thread holds: `step` apart from `first` on.
template <int Kept>
struct RowPieces {
    uint4 pieces[Kept];

    // From the level-2 cache: other multiprocessors may have written them in this launch.
    __device__ __forceinline__ void load(const QuantizeRow& row, int first, int step) {
        const auto* from = reinterpret_cast<const uint4*>(row.from);
#pragma unroll
        for (int i = 0; i < Kept; ++i) {
            const int piece = first + step * i;
            pieces[i] = piece * 8 < row.count ? __ldcg(from + piece) : make_uint4(0, 0, 0, 0);
        }
    }
    // The same of a row that is being written, and whether some of it is not written yet (few_exchange.cuh).
    __device__ __forceinline__ void look(const QuantizeRow& row, int first, int step) {
        const auto* from = reinterpret_cast<const uint4*>(row.from);
#pragma unroll
        for (int i = 0; i < Kept; ++i) {
            const int piece = first + step * i;
            pieces[i] = piece * 8 < row.count ? load_relaxed_16(from + piece) : make_uint4(0, 0, 0, 0);
        }
    }
    __device__ __forceinline__ bool is_missing() const {
        bool missing = false;
#pragma unroll
        for (int i = 0; i < Kept; ++i) {
            missing |= few_missing(pieces[i]);
        }
        return missing;
    }
    // The largest magnitude among a warp's.
    __device__ __forceinline__ float largest() const {
        uint32_t most = 0;
#pragma unroll
        for (int i = 0; i < Kept; ++i) {
            most = larger_bf16x2(most, pieces[i]);
        }
        float value = fmaxf(low_bf16(most), high_bf16(most));
#pragma unroll
        for (int offset = 16; offset > 0; offset /= 2) {
            value = fmaxf(value, __shfl_xor_sync(0xFFFFFFFFu, value, offset));
        }
        return value;
    }
    __device__ __forceinline__ void store(const QuantizeRow& row, int first, int step, float scale) const {
        const Divider divide = divider(scale);
        auto* to = reinterpret_cast<uint2*>(row.to);
#pragma unroll
        for (int i = 0; i < Kept; ++i) {
            const int piece = first + step * i;
            if (piece * 8 < row.count) {
                to[piece] = quantize_eight(pieces[i], divide);
            }
        }
    }
    // The row and its scale, by all threads of Warps warps, whose largest() are in shared memory.
    template <int Warps>
    __device__ __forceinline__ void store_scaled(const QuantizeRow& row, int thread,
                                                 const float* warps) const {
        float most = 0;
#pragma unroll
        for (int i = 0; i < Warps; ++i) {
            most = fmaxf(most, warps[i]);
        }
        const float scale = row_scale(most);
        store(row, thread, 32 * Warps, scale);
        if (thread == 0) {
            *row.scale = scale;
        }
    }
};

}  // namespace tessera::cuda

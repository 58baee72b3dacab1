// The grouped GEMM of moe: for each item (an expert and up to Tile of its rows) and each tile of 256 weight
// rows, out[row, :] = x[row, :] W^T, with either SwiGLU or a plain store behind it.
//
// Roofline: at few tokens the weights of every chosen expert are read once (H200: bytes / 4.27 TB/s); at
// many, 2 * rows * outputs * inputs operations at the wgmma rate (0.8 PFLOP/s bfloat16, 1.5 fp8).
//
// Schedule: a persistent block of three warpgroups. One produces: weight boxes by the copy engine, the rows
// of x through the row list by cp.async, both 128 bytes of K a stage, ahead by 4 to 6 stages and across
// items. Two consume: the weights are the M side of wgmma (64 rows each, twice), the rows of x the N side, so
// that a tile of 16 rows wastes nothing of the tensor cores' M. Within SwiGLU a consumer holds the gate and
// up sums of the same outputs. fp8 sums stay in the tensor cores' accumulators over all of K.
#pragma once

#include <cstdint>

#include <cuda_bf16.h>

#include "ops/common/cuda/async_copy.cuh"
#include "ops/common/cuda/convert.cuh"
#include "ops/common/cuda/exp.cuh"
#include "ops/common/cuda/wgmma.cuh"

namespace tessera::cuda {

struct GemmItem {
    int32_t expert = 0;  // = experts: the shared expert
    int32_t row = 0;     // first row of the sorted rows
    int32_t rows = 0;    // <= Tile
    int32_t unused = 0;
};

// How the routed experts or the shared one differ.
struct GemmSide {
    CUtensorMap weights;
    const uint8_t* x = nullptr;    // rows of inputs
    int32_t x_stride = 0;          // bytes between rows
    int32_t input_bytes = 0;       // K
    int32_t outputs = 0;           // per expert, after SwiGLU
    const float* scale = nullptr;  // [experts, 2] (SwiGLU) or [experts]; null = 1
    float input_scale = 1;
    const float* input_scales = nullptr;  // [experts]; null: input_scale for all
    const float* output_scale = nullptr;  // SwiGLU with fp8: [experts], the next input scale
};

struct GemmArgs {
    GemmSide routed;
    GemmSide shared;
    const GemmItem* items = nullptr;       // the routed ones, then the shared ones
    const int32_t* item_counts = nullptr;  // [2]: routed, shared
    const int32_t* row_source = nullptr;   // row of x for each sorted row; null = the same
    int32_t experts = 0;
    void* out = nullptr;     // [sorted rows, out_stride]
    int64_t out_stride = 0;  // elements
};

inline constexpr int kGemmThreads = 384;
inline constexpr int kGemmWeightRows = 256;

template <int Tile>
struct GemmLayout {
    static constexpr int kStages = Tile == 16 ? 6 : Tile == 64 ? 5 : 4;
    static constexpr int kWeightBytes = kGemmWeightRows * kSwizzleRowBytes;
    static constexpr int kStageBytes = kWeightBytes + Tile * kSwizzleRowBytes;
    static constexpr int kStagingBytes = Tile * kSwizzleRowBytes;  // of one consumer, 64 outputs wide
    static constexpr int kBarriers = kStages * kStageBytes + 2 * kStagingBytes;
    static constexpr int kBytes = kBarriers + 2 * kStages * 8 + 1024;  // 1024 to align the begin
};

// One step of the persistent loop.
struct GemmWork {
    GemmItem item;
    bool shared = false;
    int32_t tile = 0;
};

template <bool Swiglu>
__device__ __forceinline__ int gemm_tiles(const GemmSide& side) {
    constexpr int kOutputs = Swiglu ? kGemmWeightRows / 2 : kGemmWeightRows;
    return (side.outputs + kOutputs - 1) / kOutputs;
}

template <bool Swiglu>
__device__ __forceinline__ bool gemm_next(const GemmArgs& args, int index, GemmWork& work) {
    const int tiles = gemm_tiles<Swiglu>(args.routed);
    const int routed = args.item_counts[0];
    work.shared = index >= routed * tiles;
    if (!work.shared) {
        work.item = args.items[index / tiles];
        work.tile = index % tiles;
        return true;
    }
    const int rest = index - routed * tiles;
    const int shared_tiles = gemm_tiles<Swiglu>(args.shared);
    if (rest >= args.item_counts[1] * shared_tiles) {
        return false;
    }
    work.item = args.items[routed + rest / shared_tiles];
    work.tile = rest % shared_tiles;
    return true;
}

// The stage ring as one role sees it.
template <int Stages>
struct GemmRing {
    uint32_t barriers = 0;
    int stage = 0;
    uint32_t parity = 0;
    __device__ __forceinline__ uint32_t full() const { return barriers + 8 * stage; }
    __device__ __forceinline__ uint32_t empty() const { return barriers + 8 * (Stages + stage); }
    __device__ __forceinline__ void advance() {
        if (++stage == Stages) {
            stage = 0;
            parity ^= 1;
        }
    }
};

template <bool Fp8, int Tile, bool Swiglu>
__device__ __forceinline__ void gemm_produce(const GemmArgs& args, uint32_t shared_base, int thread) {
    using Layout = GemmLayout<Tile>;
    constexpr int kRowsPerThread = Tile / 16;
    constexpr int kElementBytes = Fp8 ? 1 : 2;
    GemmRing<Layout::kStages> ring{.barriers = shared_base + Layout::kBarriers};
    const int lane_row = thread / 8;
    const int piece = thread % 8;
    GemmWork work;
    for (int index = blockIdx.x; gemm_next<Swiglu>(args, index, work); index += gridDim.x) {
        const GemmSide& side = work.shared ? args.shared : args.routed;
        const int expert = work.shared ? 0 : work.item.expert;
        int32_t sources[kRowsPerThread];
#pragma unroll
        for (int i = 0; i < kRowsPerThread; ++i) {
            const int row = lane_row + 16 * i;
            sources[i] = -1;
            if (row < work.item.rows) {
                const int sorted = work.item.row + row;
                sources[i] = args.row_source != nullptr ? args.row_source[sorted] : sorted;
            }
        }
        const int first =
            Swiglu ? expert * 2 * side.outputs + work.tile * 128 : expert * side.outputs + work.tile * 256;
        const int second = first + (Swiglu ? side.outputs : 128);
        for (int k = 0; k < side.input_bytes; k += kSwizzleRowBytes) {
            const uint32_t stage = shared_base + ring.stage * Layout::kStageBytes;
            barrier_wait(ring.empty(), ring.parity ^ 1);
            if (thread == 0) {
                barrier_arrive_expect(ring.full(), Layout::kWeightBytes);
                copy_box(stage, &side.weights, k / kElementBytes, first, ring.full());
                copy_box(stage + Layout::kWeightBytes / 2, &side.weights, k / kElementBytes, second,
                         ring.full());
            }
            const int offset = k + piece * 16;
            const uint32_t to = stage + Layout::kWeightBytes + swizzle_128(lane_row, piece);
#pragma unroll
            for (int i = 0; i < kRowsPerThread; ++i) {
                const bool inside = sources[i] >= 0 && offset < side.input_bytes;
                const uint8_t* from =
                    inside ? side.x + static_cast<int64_t>(sources[i]) * side.x_stride + offset : side.x;
                copy_async_16(to + 16 * i * kSwizzleRowBytes, from, inside ? 16 : 0);
            }
            barrier_arrive_copies(ring.full());
            ring.advance();
        }
    }
    // The block must not end while copies are under way into its memory.
    copy_async_commit();
    copy_async_wait<0>();
}

// Where a consumer's 64 outputs of an item's rows go.
struct GemmStore {
    uint32_t staging = 0;  // shared memory
    int consumer = 0;
    int column = 0;          // of out: the first of the 64
    int columns = 0;         // end of the expert's outputs
    float output_scale = 1;  // fp8
};

// Through shared memory, so that a row's outputs are neighbours.
template <bool ToFp8, int Tile>
__device__ __forceinline__ void gemm_store(const float (&values)[Tile / 2], const GemmArgs& args,
                                           const GemmItem& item, const GemmStore& store) {
    const int thread = threadIdx.x % 128;
    const int lane = thread % 32;
#pragma unroll
    for (int j = 0; j < Tile / 16; ++j) {
        uint32_t matrices[4];
#pragma unroll
        for (int m = 0; m < 4; ++m) {
            matrices[m] = pack_bf16(values[8 * j + 2 * m], values[8 * j + 2 * m + 1]);
        }
        const int row = 16 * j + (lane / 16) * 8 + lane % 8;
        const int piece = (thread / 32) * 2 + (lane / 8) % 2;
        store_transposed(store.staging + swizzle_128(row, piece), matrices);
    }
    group_barrier(1 + store.consumer, 128);
#pragma unroll
    for (int i = 0; i < Tile / 16; ++i) {
        const int row = thread / 8 + 16 * i;
        const int piece = thread % 8;
        const int first = store.column + piece * 8;
        if (row < item.rows && first < store.columns) {
            uint4 raw;
            asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                         : "=r"(raw.x), "=r"(raw.y), "=r"(raw.z), "=r"(raw.w)
                         : "r"(store.staging + swizzle_128(row, piece)));
            const int64_t at = static_cast<int64_t>(item.row + row) * args.out_stride + first;
            if constexpr (ToFp8) {
                const auto narrow = [output_scale = store.output_scale](uint32_t a, uint32_t b) {
                    return pack_e4m3x4(
                        __fdiv_rn(low_bf16(a), output_scale), __fdiv_rn(high_bf16(a), output_scale),
                        __fdiv_rn(low_bf16(b), output_scale), __fdiv_rn(high_bf16(b), output_scale));
                };
                *reinterpret_cast<uint2*>(static_cast<uint8_t*>(args.out) + at) =
                    make_uint2(narrow(raw.x, raw.y), narrow(raw.z, raw.w));
            } else {
                *reinterpret_cast<uint4*>(static_cast<__nv_bfloat16*>(args.out) + at) = raw;
            }
        }
    }
    group_barrier(1 + store.consumer, 128);
}

template <bool Fp8, int Tile, bool Swiglu>
__device__ __forceinline__ void gemm_epilogue(float (&sums)[2][Tile / 2], uint32_t staging, int consumer,
                                              const GemmArgs& args, const GemmWork& work) {
    const GemmSide& side = work.shared ? args.shared : args.routed;
    const int expert = work.shared ? 0 : work.item.expert;
    float input_scale = 1;
    if constexpr (Fp8) {
        input_scale = side.input_scales != nullptr ? side.input_scales[expert] : side.input_scale;
    }
    if constexpr (Swiglu) {
        const float gate_scale = Fp8 ? input_scale * side.scale[2 * expert] : 1.0f;
        const float up_scale = Fp8 ? input_scale * side.scale[2 * expert + 1] : 1.0f;
#pragma unroll
        for (int i = 0; i < Tile / 2; ++i) {
            sums[0][i] = silu_f32(sums[0][i] * gate_scale) * (sums[1][i] * up_scale);
        }
        const float output_scale = Fp8 ? side.output_scale[expert] : 1.0f;
        gemm_store<Fp8, Tile>(
            sums[0], args, work.item,
            {staging, consumer, work.tile * 128 + consumer * 64, side.outputs, output_scale});
    } else {
        const float scale = Fp8 ? input_scale * side.scale[expert] : 1.0f;
#pragma unroll
        for (int half = 0; half < 2; ++half) {
#pragma unroll
            for (int i = 0; i < Tile / 2; ++i) {
                sums[half][i] *= scale;
            }
            gemm_store<false, Tile>(
                sums[half], args, work.item,
                {staging, consumer, work.tile * 256 + half * 128 + consumer * 64, side.outputs, 1.0f});
        }
    }
}

template <bool Fp8, int Tile, bool Swiglu>
__device__ __forceinline__ void gemm_consume(const GemmArgs& args, uint32_t shared_base, int consumer) {
    using Layout = GemmLayout<Tile>;
    GemmRing<Layout::kStages> ring{.barriers = shared_base + Layout::kBarriers};
    const uint32_t staging =
        shared_base + Layout::kStages * Layout::kStageBytes + consumer * Layout::kStagingBytes;
    const bool leader = threadIdx.x % 128 == 0;
    GemmWork work;
    for (int index = blockIdx.x; gemm_next<Swiglu>(args, index, work); index += gridDim.x) {
        const GemmSide& side = work.shared ? args.shared : args.routed;
        float sums[2][Tile / 2];
        uint32_t release = 0;
        for (int k = 0; k < side.input_bytes; k += kSwizzleRowBytes) {
            const uint32_t stage = shared_base + ring.stage * Layout::kStageBytes;
            const uint32_t weights = stage + consumer * 64 * kSwizzleRowBytes;
            barrier_wait(ring.full(), ring.parity);
            fence_proxy_async();  // cp.async wrote the rows of x
            mma_pin(sums[0]);
            mma_pin(sums[1]);
            mma_begin();
#pragma unroll
            for (int step = 0; step < kSwizzleRowBytes; step += kMmaStepBytes) {
                const uint64_t rows = mma_descriptor(stage + Layout::kWeightBytes + step);
                const int add = k > 0 || step > 0;
                mma_shared<Fp8>(sums[0], mma_descriptor(weights + step), rows, add);
                mma_shared<Fp8>(sums[1], mma_descriptor(weights + Layout::kWeightBytes / 2 + step), rows,
                                add);
            }
            mma_commit();
            mma_wait<1>();
            if (release != 0 && leader) {
                barrier_arrive(release);
            }
            release = ring.empty();
            ring.advance();
        }
        mma_wait<0>();
        mma_pin(sums[0]);
        mma_pin(sums[1]);
        if (leader) {
            barrier_arrive(release);
        }
        gemm_epilogue<Fp8, Tile, Swiglu>(sums, staging, consumer, args, work);
    }
}

template <bool Fp8, int Tile, bool Swiglu>
__global__ void __launch_bounds__(kGemmThreads, 1) grouped_gemm(const __grid_constant__ GemmArgs args) {
    using Layout = GemmLayout<Tile>;
    extern __shared__ uint8_t shared_raw[];
    const uint32_t shared_base = (shared_address(shared_raw) + 1023) / 1024 * 1024;
    const int warpgroup = threadIdx.x / 128;
    if (threadIdx.x == 0) {
        for (int stage = 0; stage < Layout::kStages; ++stage) {
            barrier_init(shared_base + Layout::kBarriers + 8 * stage, 128 + 1);
            barrier_init(shared_base + Layout::kBarriers + 8 * (Layout::kStages + stage), 2);
        }
        barrier_init_fence();
    }
    __syncthreads();
    if (warpgroup == 2) {
        registers_give<56>();
        gemm_produce<Fp8, Tile, Swiglu>(args, shared_base, threadIdx.x % 128);
    } else {
        registers_take<224>();
        gemm_consume<Fp8, Tile, Swiglu>(args, shared_base, warpgroup);
    }
}

}  // namespace tessera::cuda

// y = x W^T of at most 64 rows of x, for decode: the kernel behind skinny_linear.h.
//
// Roofline: the weights, read once: outputs * inputs bytes (fp8) at 4.27 TB/s. Operations do not matter.
//
// Schedule: a block computes `Outputs` columns of y for all rows; as many blocks as multiprocessors stream
// the whole matrix at once. One warp brings weights, in boxes of 128 bytes of K, through a ring that fills
// the shared memory. Of it some 64 KiB are on the way at a time: with more, requests wait for each other in
// front of the memory, and those of x behind them. The weights depend on no kernel, so the ring fills while
// the kernel before still runs; x, which does, has a ring and a warp of its own. Two warpgroups take the
// stages in turn. x is the M side of wgmma, its rows up to 64 garbage that is not stored; the weights are the
// N side, so that a block may have any multiple of 16 columns. With Split = 2 the two blocks of a cluster
// have half of K each and send each other halves of their sums: x, which every block reads whole, then costs
// half as much beside few weights.
//
// A row's bits do not depend on the number of rows: sums run over K in an order of the shape alone.
#pragma once

#include <cstdint>

#include <cuda.h>
#include <cuda_bf16.h>

#include "ops/common/cuda/async_copy.cuh"
#include "ops/common/cuda/cluster.cuh"
#include "ops/common/cuda/convert.cuh"
#include "ops/common/cuda/dependent_launch.cuh"
#include "ops/common/cuda/shared_access.cuh"
#include "ops/common/cuda/wgmma.cuh"

namespace tessera::cuda {

struct SkinnyArgs {
    CUtensorMap weights;  // boxes of Outputs rows
    CUtensorMap x;        // boxes of x_rows rows
    void* y = nullptr;
    int64_t y_stride = 0;                 // elements
    const float* column_scale = nullptr;  // [outputs], may be null
    const float* row_scale = nullptr;     // [rows], may be null
    float scale = 1;
    int32_t rows = 0;
    int32_t outputs = 0;
    int32_t x_rows = 0;    // rows rounded up to 8, 16, 32 or 64
    int32_t steps = 0;     // stages' worth of K of one block
    int32_t stages = 0;    // of the weights' ring: even, so that a stage is always the same consumer's
    int32_t on_way = 0;    // stages of weights asked for and not there yet, at most
    int32_t x_stages = 0;  // of the ring of x: even
    bool accumulate = false;
    bool to_float = false;
    bool wide = false;  // y is bfloat16, and pieces of 8 columns lie at multiples of 16 bytes
};

inline constexpr int kSkinnyRowsMax = 64;
inline constexpr int kSkinnyConsumers = 256;  // threads of the two warpgroups
inline constexpr int kSkinnyThreads = kSkinnyConsumers + 2 * 32;
inline constexpr int kSkinnyStagesMax = 24;

// The block's dynamic shared memory, from a 1024-byte aligned begin: weights, x, with Split the other block's
// sums. The wgmma reads 64 rows of x in any case: up to 8 KiB beyond the last stage.
struct SkinnyRings {
    uint32_t weights = 0;
    uint32_t x = 0;
    uint32_t inbox = 0;
    uint32_t weight_bytes = 0;  // of a stage
    uint32_t x_box = 0;         // bytes of a box
    uint32_t barriers = 0;      // [4][kSkinnyStagesMax], and that of the inbox

    __device__ uint32_t full(int stage) const { return barriers + 8 * stage; }
    __device__ uint32_t empty(int stage) const { return barriers + 8 * (kSkinnyStagesMax + stage); }
    __device__ uint32_t x_full(int stage) const { return barriers + 8 * (2 * kSkinnyStagesMax + stage); }
    __device__ uint32_t x_empty(int stage) const { return barriers + 8 * (3 * kSkinnyStagesMax + stage); }
    __device__ uint32_t inbox_full() const { return barriers + 8 * 4 * kSkinnyStagesMax; }
};

// A place in a ring.
struct SkinnyPlace {
    int stage = 0;
    uint32_t parity = 0;

    __device__ __forceinline__ void advance(int by, int stages) {
        stage += by;
        if (stage >= stages) {
            stage -= stages;
            parity ^= 1;
        }
    }
};

// By one thread.
template <bool Fp8, int Outputs, int Boxes, int Split>
__device__ __forceinline__ void skinny_bring_weights(const SkinnyArgs& args, const SkinnyRings& rings) {
    constexpr int kColumns = kSwizzleRowBytes / (Fp8 ? 1 : 2);
    const int row = static_cast<int>(blockIdx.x) / Split * Outputs;
    const int first_step = static_cast<int>(blockIdx.x) % Split * args.steps;
    SkinnyPlace place{0, 1};
    SkinnyPlace arriving;
    for (int step = 0; step < args.steps; ++step) {
        const int column = (first_step + step) * Boxes * kColumns;
        barrier_wait(rings.empty(place.stage), place.parity);
        if (step >= args.on_way) {
            barrier_wait(rings.full(arriving.stage), arriving.parity);
            arriving.advance(1, args.stages);
        }
        barrier_arrive_expect(rings.full(place.stage), rings.weight_bytes);
#pragma unroll
        for (int b = 0; b < Boxes; ++b) {
            copy_box_once(rings.weights + place.stage * rings.weight_bytes + b * Outputs * kSwizzleRowBytes,
                          &args.weights, column + b * kColumns, row, rings.full(place.stage));
        }
        place.advance(1, args.stages);
    }
}

// By one thread.
template <bool Fp8, int Boxes, int Split>
__device__ __forceinline__ void skinny_bring_x(const SkinnyArgs& args, const SkinnyRings& rings) {
    constexpr int kColumns = kSwizzleRowBytes / (Fp8 ? 1 : 2);
    const int first_step = static_cast<int>(blockIdx.x) % Split * args.steps;
    SkinnyPlace place{0, 1};
    wait_for_previous_kernel();
    for (int step = 0; step < args.steps; ++step) {
        const int column = (first_step + step) * Boxes * kColumns;
        barrier_wait(rings.x_empty(place.stage), place.parity);
        barrier_arrive_expect(rings.x_full(place.stage), Boxes * rings.x_box);
#pragma unroll
        for (int b = 0; b < Boxes; ++b) {
            copy_box(rings.x + (place.stage * Boxes + b) * rings.x_box, &args.x, column + b * kColumns, 0,
                     rings.x_full(place.stage));
        }
        place.advance(1, args.x_stages);
    }
}

// The sums of one consumer: every other step. The tensor cores add e4m3 products with few bits: there a
// step's sums, which are small, are their own, and float32 adds them.
template <bool Fp8, int Outputs, int Boxes>
__device__ __forceinline__ void skinny_multiply(const SkinnyArgs& args, const SkinnyRings& rings,
                                                int consumer, float (&sums)[Outputs / 2]) {
    SkinnyPlace place{consumer};
    SkinnyPlace x_place{consumer};
    float step_sums[Outputs / 2];
    float(&target)[Outputs / 2] = Fp8 ? step_sums : sums;
    for (int step = consumer; step < args.steps; step += 2) {
        const uint32_t x = rings.x + x_place.stage * Boxes * rings.x_box;
        const uint32_t weights = rings.weights + place.stage * rings.weight_bytes;
        barrier_wait(rings.x_full(x_place.stage), x_place.parity);
        barrier_wait(rings.full(place.stage), place.parity);
        mma_pin(target);
        mma_begin();
#pragma unroll
        for (int b = 0; b < Boxes; ++b) {
#pragma unroll
            for (int k = 0; k < kSwizzleRowBytes; k += kMmaStepBytes) {
                mma_shared<Fp8>(target, mma_descriptor(x + b * rings.x_box + k),
                                mma_descriptor(weights + b * Outputs * kSwizzleRowBytes + k),
                                !Fp8 || b > 0 || k > 0);
            }
        }
        mma_commit();
        mma_wait<0>();
        mma_pin(target);
        if (threadIdx.x % 128 == 0) {
            barrier_arrive(rings.empty(place.stage));
            barrier_arrive(rings.x_empty(x_place.stage));
        }
        if constexpr (Fp8) {
#pragma unroll
            for (int i = 0; i < Outputs / 2; ++i) {
                sums[i] += step_sums[i];
            }
        }
        place.advance(2, args.stages);
        x_place.advance(2, args.x_stages);
    }
}

// Adds up the consumers' sums: each ends with the sums of its own columns at the front. exchange: the rings'
// memory, which is free by now. `active`: the warp has rows that exist.
template <int Outputs>
__device__ __forceinline__ void skinny_add_up(float* exchange, int consumer, bool active,
                                              float (&sums)[Outputs / 2]) {
    constexpr int kHalf = Outputs / 4;
    constexpr int kThreads = kSkinnyConsumers / 2;
    float* mine = exchange + threadIdx.x % kThreads;  // one value of each thread after the other
    group_barrier(1, kSkinnyConsumers);
#pragma unroll
    for (int i = 0; i < kHalf && active; ++i) {
        mine[(consumer * kHalf + i) * kThreads] = consumer == 0 ? sums[kHalf + i] : sums[i];
    }
    group_barrier(1, kSkinnyConsumers);
#pragma unroll
    for (int i = 0; i < kHalf && active; ++i) {
        const float other = mine[((1 - consumer) * kHalf + i) * kThreads];
        sums[i] = (consumer == 0 ? sums[i] : sums[kHalf + i]) + other;
    }
}

// Sums that a block of a cluster of two sends the other: of each consumer's columns a half.
constexpr int skinny_part(int outputs) {
    return outputs / 8;
}
// Bytes of the inbox. Only warps with rows that exist send.
constexpr int64_t skinny_inbox_bytes(int64_t outputs, int64_t rows) {
    return (rows + 15) / 16 * 32 * 2 * skinny_part(static_cast<int>(outputs)) * 4;
}

// The blocks' sums: each ends with those of its half of the consumer's columns at the front. By warps with
// rows that exist. No block waits for the other's end: what it sends lies in memory of its own kind, and a
// block ends after it has got its part.
template <int Outputs>
__device__ __forceinline__ void skinny_exchange(const SkinnyArgs& args, const SkinnyRings& rings,
                                                int consumer, float (&sums)[Outputs / 2]) {
    constexpr int kPart = skinny_part(Outputs);
    const auto active = static_cast<uint32_t>((args.rows + 15) / 16 * 32);  // threads of a consumer
    const uint32_t rank = cluster_rank();
    const uint32_t inbox = rings.inbox + 16 * (consumer * active * kPart / 4 + threadIdx.x % 128);
    const uint32_t outbox = address_in_block(inbox, 1 - rank);
    const uint32_t told = address_in_block(rings.inbox_full(), 1 - rank);
#pragma unroll
    for (int i = 0; i < kPart; i += 4) {
        float part[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            part[j] = rank == 0 ? sums[kPart + i + j] : sums[i + j];
            sums[i + j] = rank == 0 ? sums[i + j] : sums[kPart + i + j];
        }
        store_to_block(outbox + 4 * active * i, part, told);
    }
    barrier_wait(rings.inbox_full(), 0);
#pragma unroll
    for (int i = 0; i < kPart; i += 4) {
        const uint4 other = load_shared_16(inbox + 4 * active * i);
        sums[i] += __uint_as_float(other.x);
        sums[i + 1] += __uint_as_float(other.y);
        sums[i + 2] += __uint_as_float(other.z);
        sums[i + 3] += __uint_as_float(other.w);
    }
}

// Of four neighbouring lanes: word i of the lane of place j becomes word j of the lane of place i.
__device__ __forceinline__ void transpose_quad(uint32_t (&words)[4]) {
#pragma unroll
    for (int bit = 1; bit < 4; bit *= 2) {
        const bool set = (threadIdx.x & static_cast<unsigned>(bit)) != 0;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if ((i & bit) == 0) {
                const uint32_t got = __shfl_xor_sync(~0u, set ? words[i] : words[i + bit], bit);
                words[i] = set ? got : words[i];
                words[i + bit] = set ? words[i + bit] : got;
            }
        }
    }
}

// What a thread's results are scaled by and added to, loaded ahead: rows l / 4 and l / 4 + 8 of its warp's
// 16, of each 8 columns two neighbours.
template <int Groups>
struct SkinnyEpilogue {
    int row = 0;
    int column = 0;
    float2 column_scale[Groups];
    float row_scale[2];
    uint32_t before[Groups][2];

    __device__ __forceinline__ bool has(const SkinnyArgs& args, int group, int half) const {
        return row + 8 * half < args.rows && column + 8 * group < args.outputs;
    }
    // Before wait_for_previous_kernel(): the scales of the columns are weights.
    __device__ __forceinline__ void load_weights(const SkinnyArgs& args) {
#pragma unroll
        for (int j = 0; j < Groups; ++j) {
            column_scale[j] = args.column_scale != nullptr && has(args, j, 0)
                                  ? *reinterpret_cast<const float2*>(args.column_scale + column + 8 * j)
                                  : make_float2(1, 1);
        }
    }
    // After it.
    __device__ __forceinline__ void load_rows(const SkinnyArgs& args) {
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const bool scaled = args.row_scale != nullptr && row + 8 * h < args.rows;
            row_scale[h] = args.scale * (scaled ? args.row_scale[row + 8 * h] : 1.0f);
            const auto* y =
                static_cast<const __nv_bfloat16*>(args.y) + (row + 8 * h) * args.y_stride + column;
#pragma unroll
            for (int j = 0; j < Groups; ++j) {
                before[j][h] =
                    args.accumulate && has(args, j, h) ? *reinterpret_cast<const uint32_t*>(y + 8 * j) : 0u;
            }
        }
    }
    // Two neighbouring results.
    template <int Count>
    __device__ __forceinline__ float2 result(const float (&sums)[Count], int group, int half) const {
        return make_float2(fmaf(sums[4 * group + 2 * half], row_scale[half] * column_scale[group].x,
                                low_bf16(before[group][half])),
                           fmaf(sums[4 * group + 2 * half + 1], row_scale[half] * column_scale[group].y,
                                high_bf16(before[group][half])));
    }
    template <int Count>
    __device__ __forceinline__ void store(const SkinnyArgs& args, const float (&sums)[Count]) const {
        if (args.wide) {
            store_wide(args, sums);
            return;
        }
#pragma unroll
        for (int h = 0; h < 2; ++h) {
            const int64_t at = (row + 8 * h) * args.y_stride + column;
#pragma unroll
            for (int j = 0; j < Groups; ++j) {
                if (!has(args, j, h)) {
                    continue;
                }
                const float2 y = result(sums, j, h);
                if (args.to_float) {
                    *reinterpret_cast<float2*>(static_cast<float*>(args.y) + at + 8 * j) = y;
                } else {
                    *reinterpret_cast<uint32_t*>(static_cast<__nv_bfloat16*>(args.y) + at + 8 * j) =
                        pack_bf16(y.x, y.y);
                }
            }
        }
    }
    // The pieces of 8 columns that four lanes hold together, each by one of them: a store of a warp takes as
    // long as it has rows, whatever it stores of each.
    template <int Count>
    __device__ __forceinline__ void store_wide(const SkinnyArgs& args, const float (&sums)[Count]) const {
        constexpr int kPieces = 2 * Groups;
        const int place = static_cast<int>(threadIdx.x) % 4;
#pragma unroll
        for (int first = 0; first < kPieces; first += 4) {
            uint32_t words[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int piece = first + i < kPieces ? first + i : first;
                const float2 y = result(sums, piece % Groups, piece / Groups);
                words[i] = pack_bf16(y.x, y.y);
            }
            transpose_quad(words);
            const int piece = first + place;
            const int half = piece < Groups ? 0 : 1;
            const int y_row = row + 8 * half;
            const int y_column = column - 2 * place + 8 * (piece - half * Groups);
            if (piece < kPieces && y_row < args.rows && y_column < args.outputs) {
                *reinterpret_cast<uint4*>(static_cast<__nv_bfloat16*>(args.y) + y_row * args.y_stride +
                                          y_column) = make_uint4(words[0], words[1], words[2], words[3]);
            }
        }
    }
};

template <bool Fp8, int Outputs, int Boxes, int Split>
__device__ __forceinline__ void skinny_consume(const SkinnyArgs& args, const SkinnyRings& rings,
                                               float* exchange) {
    constexpr int kGroups = Outputs / 16 / Split;  // of 8 columns that a consumer of a block ends
    const int consumer = static_cast<int>(threadIdx.x) / 128;
    const int warp_row = static_cast<int>(threadIdx.x) % 128 / 32 * 16;
    const int lane = static_cast<int>(threadIdx.x) % 32;
    SkinnyEpilogue<kGroups> epilogue;
    epilogue.row = warp_row + lane / 4;
    const int rank = static_cast<int>(blockIdx.x) % Split;
    const int first = static_cast<int>(blockIdx.x) / Split * Outputs;
    const bool active = warp_row < args.rows;
    epilogue.column = first + 8 * kGroups * (consumer * Split + rank) + 2 * (lane % 4);
    epilogue.load_weights(args);
    wait_for_previous_kernel();
    epilogue.load_rows(args);
    float sums[Outputs / 2];
#pragma unroll
    for (float& sum : sums) {
        sum = 0;
    }
    skinny_multiply<Fp8, Outputs, Boxes>(args, rings, consumer, sums);
    skinny_add_up<Outputs>(exchange, consumer, active, sums);
    if constexpr (Split == 2) {
        cluster_wait();  // the other block's barrier is ready
        if (active) {
            skinny_exchange<Outputs>(args, rings, consumer, sums);
        }
    }
    epilogue.store(args, sums);
}

template <bool Fp8, int Outputs, int Boxes, int Split>
__global__ void __cluster_dims__(Split, 1, 1) __launch_bounds__(kSkinnyThreads, 1)
    skinny_kernel(const __grid_constant__ SkinnyArgs args) {
    extern __shared__ uint8_t memory[];
    __shared__ uint64_t barriers[4 * kSkinnyStagesMax + 1];
    SkinnyRings rings;
    rings.weights = (shared_address(memory) + 1023) / 1024 * 1024;
    rings.weight_bytes = Boxes * Outputs * kSwizzleRowBytes;
    rings.x = rings.weights + static_cast<uint32_t>(args.stages) * rings.weight_bytes;
    rings.x_box = static_cast<uint32_t>(args.x_rows) * kSwizzleRowBytes;
    rings.inbox = rings.x + static_cast<uint32_t>(args.x_stages * Boxes) * rings.x_box;
    rings.barriers = shared_address(barriers);
    const bool weights_leader = threadIdx.x == kSkinnyConsumers;
    const bool x_leader = threadIdx.x == kSkinnyConsumers + 32;
    if (weights_leader) {
        prefetch_map(&args.weights);
        for (int stage = 0; stage < args.stages; ++stage) {  // by one thread: lanes would take turns
            barrier_init(rings.full(stage), 1);
            barrier_init(rings.empty(stage), 1);
        }
        barrier_init_fence();
    } else if (x_leader) {
        prefetch_map(&args.x);
        for (int stage = 0; stage < args.x_stages; ++stage) {
            barrier_init(rings.x_full(stage), 1);
            barrier_init(rings.x_empty(stage), 1);
        }
        if constexpr (Split == 2) {
            barrier_init(rings.inbox_full(), 1);
        }
        barrier_init_fence();
        if constexpr (Split == 2) {
            barrier_arrive_expect(rings.inbox_full(),
                                  static_cast<uint32_t>(skinny_inbox_bytes(Outputs, args.rows)));
        }
    }
    __syncthreads();
    if constexpr (Split == 2) {
        cluster_arrive();
    }
    let_next_kernel_start();
    if (threadIdx.x < kSkinnyConsumers) {
        auto* exchange = reinterpret_cast<float*>(memory + (rings.weights - shared_address(memory)));
        skinny_consume<Fp8, Outputs, Boxes, Split>(args, rings, exchange);
        return;
    }
    if (weights_leader) {
        skinny_bring_weights<Fp8, Outputs, Boxes, Split>(args, rings);
    } else if (x_leader) {
        skinny_bring_x<Fp8, Boxes, Split>(args, rings);
    }
    if constexpr (Split == 2) {
        __syncwarp();
        cluster_wait();
    }
}

}  // namespace tessera::cuda

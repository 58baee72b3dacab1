// The experts' kernel of grouped weights: int4 or e4m3, with a scale for each group of 128 inputs, and e4m3
// activations with a scale for each row.
//
// Roofline: as experts_kernel.cuh, with 0.516 bytes a weight of int4 (codes, and bfloat16 scales), 1.002 of
// e4m3.
//
// Schedule: experts_kernel.cuh's, and its producers. What differs: weights come as units (w4_layout.h,
// w8_layout.h) by plain bulk copies; a consumer has them as e4m3 in registers, the A side of wgmma; each
// group's sums start at zero and are added with the group's scale; act is stored in bfloat16, and the block
// that stores an item's last tile quantises its rows, since their scales need all of their outputs.
#pragma once

#include "device/cuda/cuda_check.h"
#include "ops/common/cuda/shared_access.cuh"
#include "ops/moe/cuda/experts_consume.cuh"
#include "ops/moe/cuda/experts_grouped.h"
#include "ops/moe/cuda/experts_produce.cuh"
#include "ops/moe/cuda/grouped_products.cuh"
#include "ops/moe/cuda/grouped_rows.cuh"
#include "ops/moe/cuda/quantize_row.cuh"

namespace tessera::cuda {

// A stage: the rows' 128 inputs, then 2 * Blocks units' group. Outputs as in ExpertsShape. Resident: blocks
// of a multiprocessor. Kind: W4Units or W8Units.
template <typename Kind, int Blocks, int TileMax, int Stages, int Resident = 1>
struct ExpertsGroupedShape {
    using Units = Kind;
    static constexpr int kConsumers = 2;
    static constexpr int kBlocks = Blocks;
    static constexpr int kResident = Resident;
    static constexpr bool kFencedRows = Resident > 1;  // by those who copy them
    // Of a thread, that brings and that consumes.
    static constexpr int kBringRegisters = Resident > 1 ? 48 : 40;
    static constexpr int kConsumeRegisters = Resident > 1 ? 96 : 232;
    static constexpr int kTileMax = TileMax;
    static constexpr int kTileMin = TileMax > 96 ? 96 : 16;
    static constexpr int kStages = Stages;
    static constexpr int kWeightRows = 128 * Blocks;
    static constexpr int kOutputs = kWeightRows / 2;
    static constexpr int kConsumerArrivals = 8 * kWarpArrivals;
    static constexpr int kRowsOffset = 0;
    static constexpr int kWeightsOffset = TileMax * kSwizzleRowBytes;
    static constexpr int kUnitBytes = Kind::kGroupBytes;
    static constexpr int kStageBytes = (kWeightsOffset + 2 * Blocks * kUnitBytes + 1023) / 1024 * 1024;
    static constexpr int kSlots = Resident > 1 ? 6 : 3;
    static constexpr int kBarriers = Stages * kStageBytes;
    static constexpr int kTiles = kBarriers + (2 * Stages + 2 * kSlots) * 8;
    static constexpr bool kRowScales = true;
    static constexpr bool kOwnPlan = false;
    static constexpr int kSlotBytes = 32 + TileMax * 8 + 16;
    // For each consumer: the rows' scales, and up to 64 rows of results.
    static constexpr int kResults = (TileMax * 4 + 127) / 128 * 128;
    static constexpr int kEndBytes = kResults + (TileMax < 64 ? TileMax : 64) * kSwizzleRowBytes;
    static constexpr int kEnds = ((kTiles + 15) / 16 * 16 + kSlots * kSlotBytes + 127) / 128 * 128;
    static constexpr int kBytes = kEnds + 2 * kEndBytes;
    static_assert((kBytes + 1024) * Resident <= 228 * 1024);
};

// What does not change from tile to tile.
struct GroupedSide {
    const uint8_t* codes = nullptr;
    int64_t unit_bytes = 0;
    int units = 0;  // of an expert
    int inputs = 0;
};
template <typename Units>
__device__ __forceinline__ GroupedSide grouped_side(const ExpertsGroupedArgs& args, int phase) {
    const int width = args.experts.routed.width;
    const int inputs = phase == 0 ? args.experts.hidden : width;
    return {.codes = phase == 0 ? args.gate_up : args.down,
            .unit_bytes = Units::bytes(inputs),
            .units = phase == 0 ? width / 32 : args.experts.hidden / static_cast<int>(kGroupedUnitRows),
            .inputs = inputs};
}

// One thread.
template <typename Shape>
__device__ __forceinline__ void grouped_bring_weights(const ExpertsGroupedArgs& args,
                                                      const ExpertsMemory<Shape>& memory) {
    constexpr int kUnits = 2 * Shape::kBlocks;
    ExpertsRing<Shape::kStages> stages = memory.stages();
    ExpertsRing<Shape::kSlots> tiles = memory.tiles();
    for (;;) {
        const ExpertsTile tile = acquire_tile(memory, tiles);
        barrier_arrive(tiles.empty());
        tiles.advance();
        if (tile.phase < 0) {
            return;
        }
        const GroupedSide side = grouped_side<typename Shape::Units>(args, tile.phase);
        const int first = tile.tile * kUnits;
        const int units = min(kUnits, side.units - first);
        const uint8_t* from =
            side.codes + (static_cast<int64_t>(tile.expert) * side.units + first) * side.unit_bytes;
        for (int input = 0; input < side.inputs; input += static_cast<int>(kGroupedInputs)) {
            const uint32_t bytes = Shape::Units::bytes_of_group(side.inputs - input);
            const uint32_t to = memory.address + stages.stage * Shape::kStageBytes + Shape::kWeightsOffset;
            barrier_wait(stages.empty(), stages.parity ^ 1);
            barrier_arrive_expect(stages.full(), units * bytes);
            for (int unit = 0; unit < units; ++unit) {
                copy_bulk(to + unit * Shape::kUnitBytes, from + unit * side.unit_bytes, bytes, stages.full());
            }
            from += Shape::kUnitBytes;
            stages.advance();
        }
    }
}

// A tile's rows as a consumer sees them.
template <typename Shape>
struct GroupedRows {
    bool copied = false;  // they came by cp.async
    int count = 0;
    const float* listed = nullptr;          // their scales in the tiles' list, with the first stage
    uint32_t scales = 0;                    // where the consumer keeps them
    ExpertsRing<Shape::kSlots> tiles = {};  // place in the list
};
// Afterwards the place in the list is free.
template <typename Shape>
__device__ __forceinline__ void grouped_keep_scales(const GroupedRows<Shape>& rows) {
    for (int row = static_cast<int>(threadIdx.x % 128); row < rows.count; row += 128) {
        store_shared(rows.scales + row * 4, rows.listed[row]);
    }
    release_tile(rows.tiles);
}

// The groups of a tile, one after another, as one consumer sees them: a product is under way while the next
// group's weights are brought to e4m3 and the last one's sums are added.
template <typename Shape, int N>
struct GroupedTile {
    using Units = typename Shape::Units;
    using Raw = typename Units::Raw;
    using Weights = typename Units::Weights;
    ExpertsConsumer<Shape>& me;
    ExpertsRing<Shape::kStages> done;  // the oldest stage in use
    const bool copied;                 // the rows came by cp.async

    // The first stage is there when this returns, and the rows' scales are kept.
    __device__ __forceinline__ GroupedTile(ExpertsConsumer<Shape>& consumer, const GroupedRows<Shape>& rows)
        : me(consumer), done(consumer.ring), copied(rows.copied) {
        acquire();
        grouped_keep_scales(rows);
    }

    __device__ __forceinline__ uint32_t stage() const {
        return me.memory + me.ring.stage * Shape::kStageBytes;
    }
    __device__ __forceinline__ void acquire() const {
        barrier_wait(me.ring.full(), me.ring.parity);
        if (copied) {
            fence_proxy_async();
        }
    }
    __device__ __forceinline__ Raw raw(int block) const {
        return Units::load(stage() + Shape::kWeightsOffset +
                           (me.index * Shape::kBlocks + block) * Shape::kUnitBytes);
    }
    __device__ __forceinline__ Weights weights(int block) const { return Units::convert(raw(block)); }
};

// One block, one set of partial sums: many rows.
template <typename Shape, int N>
__device__ __forceinline__ void grouped_multiply_wide(float (&sums)[N / 2], ExpertsConsumer<Shape>& me,
                                                      int steps, const GroupedRows<Shape>& rows_from) {
    GroupedTile<Shape, N> tile(me, rows_from);
    float part[N / 2];
    auto raw = tile.raw(0);
    for (int step = 0; step < steps; ++step) {
        const auto weights = Shape::Units::convert(raw);
        grouped_issue<N>(part, weights, mma_descriptor(tile.stage()));
        me.ring.advance();
        if (step + 1 < steps) {
            tile.acquire();
            raw = tile.raw(0);
        }
        mma_wait<0>();
        grouped_hold(weights);
        grouped_promote<N>(sums, part, weights);
        grouped_release(tile.done);
    }
}

// Two blocks: one set of partial sums, as the registers allow.
template <typename Shape, int N>
__device__ __forceinline__ void grouped_multiply_broad(float (&sums)[2][N / 2], ExpertsConsumer<Shape>& me,
                                                       int steps, const GroupedRows<Shape>& rows_from) {
    GroupedTile<Shape, N> tile(me, rows_from);
    float part[N / 2];
    auto first = tile.weights(0);
    for (int step = 0; step < steps; ++step) {
        const uint64_t rows = grouped_rows(tile.stage());
        grouped_issue<N>(part, first, rows);
        const auto second = tile.weights(1);
        mma_wait<0>();
        grouped_hold(first);
        grouped_promote<N>(sums[0], part, first);
        grouped_issue<N>(part, second, rows);
        me.ring.advance();
        if (step + 1 < steps) {
            tile.acquire();
            first = tile.weights(0);
        }
        mma_wait<0>();
        grouped_hold(second);
        grouped_promote<N>(sums[1], part, second);
        grouped_release(tile.done);
    }
}

// The same with the weights of one block at a time, where registers are few and another block of the
// multiprocessor multiplies meanwhile.
template <typename Shape, int N>
__device__ __forceinline__ void grouped_multiply_in_turn(float (&sums)[Shape::kBlocks][N / 2],
                                                         ExpertsConsumer<Shape>& me, int steps,
                                                         const GroupedRows<Shape>& rows_from) {
    GroupedTile<Shape, N> tile(me, rows_from);
    float part[N / 2];
    for (int step = 0; step < steps; ++step) {
        const uint64_t rows = grouped_rows(tile.stage());
#pragma unroll
        for (int block = 0; block < Shape::kBlocks; ++block) {
            const auto weights = tile.weights(block);
            grouped_issue<N>(part, weights, rows);
            mma_wait<0>();
            grouped_hold(weights);
            grouped_promote<N>(sums[block], part, weights);
        }
        me.ring.advance();
        if (step + 1 < steps) {
            tile.acquire();
        }
        grouped_release(tile.done);
    }
}

// sums = weights x rows over all inputs, but for Units::kScale and the rows' scales.
template <typename Shape, int N>
__device__ __forceinline__ void grouped_multiply_tile(float (&sums)[Shape::kBlocks][N / 2],
                                                      ExpertsConsumer<Shape>& me, int steps,
                                                      const GroupedRows<Shape>& rows) {
#pragma unroll
    for (int block = 0; block < Shape::kBlocks; ++block) {
#pragma unroll
        for (int i = 0; i < N / 2; ++i) {
            sums[block][i] = 0;
        }
    }
    if constexpr (Shape::kResident > 1 && (Shape::kBlocks > 1 ? N > 16 : !Shape::Units::kAhead)) {
        grouped_multiply_in_turn<Shape, N>(sums, me, steps, rows);
    } else if constexpr (Shape::kBlocks > 1) {
        grouped_multiply_broad<Shape, N>(sums, me, steps, rows);
    } else {
        grouped_multiply_wide<Shape, N>(sums[0], me, steps, rows);
    }
}

// The stages of a tile in which this consumer has no outputs.
template <typename Shape>
__device__ __forceinline__ void grouped_pass(ExpertsConsumer<Shape>& me, int steps) {
    for (int step = 0; step < steps; ++step) {
        barrier_wait(me.ring.full(), me.ring.parity);
        grouped_release(me.ring);
    }
}

struct GroupedEnd {
    uint32_t scales = 0;   // shared memory
    uint32_t results = 0;  // the same
    int barrier = 0;
};
// The tokens' scales as the sums of a thread need them.
template <typename Shape>
__device__ __forceinline__ float2 grouped_token_scales(uint32_t scales, int j) {
    const float2 pair = column_pair(scales, j);
    return make_float2(pair.x * Shape::Units::kScale, pair.y * Shape::Units::kScale);
}

// [64 rows, 8 * Pieces columns] bfloat16 from shared memory (swizzled rows of 128 bytes) to `out`.
template <int Pieces>
__device__ __forceinline__ void grouped_copy_rows(const ExpertsTarget& to, int first) {
    const int thread = static_cast<int>(threadIdx.x % 128);
    const int column = to.column + thread % 8 * 8;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        const int row = 16 * i + thread / 8;
        if (first + row < to.rows && column < to.columns && thread % 8 < Pieces) {
            *reinterpret_cast<uint4*>(to.out + (first + row) * to.stride + column * 2) =
                load_shared_16(to.buffer + swizzle_128(row, thread % 8));
        }
    }
}

template <typename Shape, int N>
__device__ __forceinline__ void grouped_store_act(const float (&sums)[Shape::kBlocks][N / 2],
                                                  const ExpertsTarget& to, const GroupedEnd& end) {
    const int thread = static_cast<int>(threadIdx.x % 128);
    const int lane = thread % 32;
#pragma unroll
    for (int chunk = 0; chunk < N; chunk += 64) {
#pragma unroll
        for (int j = chunk / 8; j < min(chunk + 64, N) / 8; j += 2) {
#pragma unroll
            for (int block = 0; block < Shape::kBlocks; ++block) {
                uint32_t matrices[2];
#pragma unroll
                for (int m = 0; m < 2; ++m) {
                    const float2 scales = grouped_token_scales<Shape>(end.scales, j + m);
                    const float* sum = sums[block] + 4 * (j + m);
                    matrices[m] = pack_bf16(swiglu(sum[0] * scales.x, sum[2] * scales.x),
                                            swiglu(sum[1] * scales.y, sum[3] * scales.y));
                }
                store_transposed(to.buffer + swizzle_128(8 * j - chunk + lane % 16, block * 4 + thread / 32),
                                 matrices);
            }
        }
        group_barrier(end.barrier, 128);
        grouped_copy_rows<4 * Shape::kBlocks>(to, chunk);
        if (chunk + 64 < N) {
            group_barrier(end.barrier, 128);
        }
    }
}

// more: another block follows.
template <typename Shape, int N>
__device__ __forceinline__ void grouped_store_out(const float (&sums)[N / 2], const ExpertsTarget& to,
                                                  const GroupedEnd& end, bool more) {
    const int thread = static_cast<int>(threadIdx.x % 128);
    const int lane = thread % 32;
    const int place = thread / 32 * 2 + lane / 8 % 2;
#pragma unroll
    for (int chunk = 0; chunk < N; chunk += 64) {
#pragma unroll
        for (int j = chunk / 8; j < min(chunk + 64, N) / 8; j += 2) {
            uint32_t matrices[4];
#pragma unroll
            for (int m = 0; m < 4; ++m) {
                const float2 scales = grouped_token_scales<Shape>(end.scales, j + m / 2);
                matrices[m] = pack_bf16(sums[4 * j + 2 * m] * scales.x, sums[4 * j + 2 * m + 1] * scales.y);
            }
            store_transposed(to.buffer + swizzle_128(8 * j - chunk + lane / 16 * 8 + lane % 8, place),
                             matrices);
        }
        group_barrier(end.barrier, 128);
        grouped_copy_rows<8>(to, chunk);
        if (more || chunk + 64 < N) {
            group_barrier(end.barrier, 128);
        }
    }
}

__device__ __forceinline__ QuantizeRow grouped_act_row(const ExpertsGroupedArgs& args, int row) {
    const int width = args.experts.routed.width;
    return {.from = args.act_bf16 + static_cast<int64_t>(row) * width,
            .to = args.experts.act + row * args.experts.act_stride,
            .scale = args.act_scale + row,
            .count = width};
}

// A warp's rows: from `row` on, `step` apart. Rows of them side by side, Kept pieces of each in a thread.
template <int Kept, int Rows>
__device__ __forceinline__ void grouped_quantize_rows(const ExpertsGroupedArgs& args, int row, int end,
                                                      int step) {
    const int lane = static_cast<int>(threadIdx.x % 32);
    for (; row < end; row += Rows * step) {
        RowPieces<Kept> pieces[Rows];
#pragma unroll
        for (int i = 0; i < Rows; ++i) {
            pieces[i].load(grouped_act_row(args, min(row + i * step, end - 1)), lane, 32);
        }
#pragma unroll
        for (int i = 0; i < Rows; ++i) {
            if (row + i * step < end) {
                const QuantizeRow work = grouped_act_row(args, row + i * step);
                const float scale = row_scale(pieces[i].largest());
                pieces[i].store(work, lane, 32, scale);
                if (lane == 0) {
                    *work.scale = scale;
                }
            }
        }
    }
}

// For what this block has written, and others read: __threadfence() is sequentially consistent, which costs
// more.
__device__ __forceinline__ void grouped_fence() {
    asm volatile("fence.acq_rel.gpu;" ::: "memory");
}

// group_barrier(), and whether any of the threads says so.
__device__ __forceinline__ bool group_any(int barrier, int threads, bool mine) {
    uint32_t any;
    asm volatile(
        "{\n.reg .pred p, q;\n"
        "setp.ne.u32 p, %1, 0;\n"
        "barrier.cta.red.or.pred q, %2, %3, p;\n"
        "selp.u32 %0, 1, 0, q;\n}\n"
        : "=r"(any)
        : "r"(mine ? 1u : 0u), "r"(barrier), "r"(threads)
        : "memory");
    return any != 0;
}

// By both consumers, when a block's tile of act is stored. The block that stores an item's last one quantises
// its rows: all its warps, since down tiles wait for it (one consumer took 9 us for 21 rows, 28 for 85).
template <typename Shape>
__device__ __forceinline__ void grouped_finish_act(const ExpertsGroupedArgs& args, const ExpertsTile& tile) {
    constexpr int kBoth = 3;  // barrier
    constexpr int kWarps = 8;
    group_barrier(kBoth, 32 * kWarps);
    const int width = args.experts.routed.width;
    bool last = false;
    if (threadIdx.x == 0) {
        const int target = (width + Shape::kOutputs - 1) / Shape::kOutputs;
        grouped_fence();
        last = atomicAdd(args.stored + tile.item, 1) == target - 1;
        if (last) {
            grouped_fence();
        }
    }
    if (!group_any(kBoth, 32 * kWarps, last)) {
        return;
    }
    const int row = tile.row + static_cast<int>(threadIdx.x / 32);
    const int end = tile.row + tile.rows;
    constexpr int kKept = static_cast<int>(kGroupedWidthMax) / 256;
    if (width <= 128 * kKept) {
        grouped_quantize_rows<kKept / 2, 2>(args, row, end, kWarps);
    } else {
        grouped_quantize_rows<kKept, Shape::kResident == 1 ? 2 : 1>(args, row, end, kWarps);
    }
    group_barrier(kBoth, 32 * kWarps);
    if (threadIdx.x == 0) {
        grouped_fence();
        atomicAdd(args.experts.ready + tile.item, 1);
    }
}

template <typename Shape, int N>
__device__ __forceinline__ void grouped_consume_tile(const ExpertsGroupedArgs& args, const ExpertsTile& tile,
                                                     ExpertsConsumer<Shape>& me,
                                                     const GroupedRows<Shape>& rows, const GroupedEnd& end) {
    const GroupedSide side = grouped_side<typename Shape::Units>(args, tile.phase);
    const int steps = (side.inputs + kSwizzleRowBytes - 1) / kSwizzleRowBytes;
    const int unit = (tile.tile * 2 + me.index) * Shape::kBlocks;
    if (unit >= side.units) {
        release_tile(rows.tiles);
        grouped_pass(me, steps);
        return;
    }
    float sums[Shape::kBlocks][N / 2];
    grouped_multiply_tile<Shape, N>(sums, me, steps, rows);
    group_barrier(end.barrier, 128);  // the scales are there, and the last tile's results are copied
    const int64_t stride = 2 * static_cast<int64_t>(tile.phase == 0 ? side.units * 32 : args.experts.hidden);
    ExpertsTarget to{.out = (tile.phase == 0 ? reinterpret_cast<uint8_t*>(args.act_bf16)
                                             : static_cast<uint8_t*>(args.experts.out)) +
                            tile.row * stride,
                     .stride = stride,
                     .rows = tile.rows,
                     .column = unit * (tile.phase == 0 ? 32 : 64),
                     .columns = tile.phase == 0 ? side.units * 32 : args.experts.hidden,
                     .buffer = end.results,
                     .barrier = end.barrier};
    if (tile.phase == 0) {
        grouped_store_act<Shape, N>(sums, to, end);
    } else {
#pragma unroll
        for (int block = 0; block < Shape::kBlocks; ++block) {
            grouped_store_out<Shape, N>(sums[block], to, end, block + 1 < Shape::kBlocks);
            to.column += 64;
        }
    }
}

template <typename Shape, int N>
__device__ __forceinline__ void grouped_consume_width(const ExpertsGroupedArgs& args, const ExpertsTile& tile,
                                                      ExpertsConsumer<Shape>& me,
                                                      const GroupedRows<Shape>& rows, const GroupedEnd& end) {
    if constexpr (N < Shape::kTileMax) {
        if (tile.columns > N) {
            grouped_consume_width<Shape, N + 16>(args, tile, me, rows, end);
            return;
        }
    }
    grouped_consume_tile<Shape, N>(args, tile, me, rows, end);
}

template <typename Shape>
__device__ __forceinline__ void grouped_consume(const ExpertsGroupedArgs& args,
                                                const ExpertsMemory<Shape>& memory, int consumer) {
    ExpertsConsumer<Shape> me{.memory = memory.address, .ring = memory.stages(), .index = consumer};
    const uint32_t scales = memory.address + Shape::kEnds + consumer * Shape::kEndBytes;
    const GroupedEnd end{.scales = scales, .results = scales + Shape::kResults, .barrier = 1 + consumer};
    ExpertsRing<Shape::kSlots> tiles = memory.tiles();
    for (;;) {
        const ExpertsTile tile = acquire_tile(memory, tiles);
        if (tile.phase < 0) {
            return;
        }
        const int begin = tile.phase == 0 ? 0 : grouped_scales_begin(tile.row);
        const GroupedRows<Shape> rows{
            .copied = !Shape::kFencedRows && tile.phase == 0 && !args.experts.x_sorted,
            .count = tile.rows,
            .listed = memory.row_scales(tiles.stage) + begin,
            .scales = scales,
            .tiles = tiles};
        tiles.advance();
        grouped_consume_width<Shape, Shape::kTileMin>(args, tile, me, rows, end);
        if (tile.phase == 0) {
            grouped_finish_act<Shape>(args, tile);
        }
    }
}

template <typename Shape>
__global__ void __launch_bounds__(kExpertsThreads, Shape::kResident)
    experts_grouped_kernel(const __grid_constant__ ExpertsGroupedArgs args, const ExpertsLook look) {
    extern __shared__ __align__(1024) uint8_t shared_raw[];
    const ExpertsMemory<Shape> memory{.base = shared_raw, .address = shared_address(shared_raw)};
    const int warpgroup = static_cast<int>(threadIdx.x / 128);
    if (threadIdx.x == 0) {
        experts_init_barriers(memory);
    }
    __syncthreads();
    let_next_kernel_start();
    if (warpgroup == 2) {
        registers_give<Shape::kBringRegisters>();
        const int warp = static_cast<int>(threadIdx.x % 128 / 32);
        if (warp == 0) {
            experts_schedule(args.experts, memory, look);
        } else if (warp == 1) {
            if (threadIdx.x % 32 == 0) {
                grouped_bring_weights(args, memory);
            }
        } else {
            grouped_bring_rows(args, memory);
        }
    } else {
        registers_take<Shape::kConsumeRegisters>();
        grouped_consume(args, memory, warpgroup);
    }
}

template <typename Shape>
void launch_grouped(cudaStream_t stream, const ExpertsGroupedArgs& args, int multiprocessors) {
    cuda_check(cudaFuncSetAttribute(experts_grouped_kernel<Shape>,
                                    cudaFuncAttributeMaxDynamicSharedMemorySize, Shape::kBytes));
    if (Shape::kResident > 1) {  // all blocks must run at once: each begins with the tile of its own number
        cuda_check(cudaFuncSetAttribute(experts_grouped_kernel<Shape>,
                                        cudaFuncAttributePreferredSharedMemoryCarveout,
                                        cudaSharedmemCarveoutMaxShared));
    }
    cuda_check(launch_dependent({.grid = dim3(static_cast<unsigned>(Shape::kResident * multiprocessors)),
                                 .threads = kExpertsThreads,
                                 .shared_bytes = Shape::kBytes,
                                 .stream = stream},
                                experts_grouped_kernel<Shape>, args, ExpertsLook{}));
}

}  // namespace tessera::cuda

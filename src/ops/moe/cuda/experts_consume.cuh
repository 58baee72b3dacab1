// The consuming warpgroups of the experts' kernel: products, SwiGLU, stores.
#pragma once

#include <cuda_bf16.h>

#include "ops/common/cuda/convert.cuh"
#include "ops/common/cuda/dependent_launch.cuh"
#include "ops/common/cuda/mma.cuh"
#include "ops/common/cuda/wgmma_shapes.cuh"
#include "ops/moe/cuda/experts.cuh"
#include "ops/moe/cuda/swiglu.cuh"

namespace tessera::cuda {

// Scales of a tile: of the sums, and one over the next input's.
struct ExpertsScales {
    float gate = 1;  // or of the down product
    float up = 1;
    float inverse_output = 1;
};

template <bool Fp8>
__device__ __forceinline__ ExpertsScales experts_scales(const ExpertsSide& side, const ExpertsTile& tile) {
    ExpertsScales scales;
    if constexpr (Fp8) {
        if (tile.phase == 0) {
            scales.gate = side.input_scale * side.gate_up_scale[2 * tile.expert];
            scales.up = side.input_scale * side.gate_up_scale[2 * tile.expert + 1];
            scales.inverse_output = __frcp_rn(side.down_input_scale[tile.expert]);
        } else {
            scales.gate = side.down_input_scale[tile.expert] * side.down_scale[tile.expert];
        }
    }
    return scales;
}

// What a consumer knows beside the tile.
template <typename Shape>
struct ExpertsConsumer {
    uint32_t memory = 0;  // begin of the stages
    ExpertsRing<Shape::kStages> ring;
    int index = 0;  // 0 or 1
    bool leader = false;
    uint32_t buffer =
        0;  // of kResultBytes: without one of its own, the last stage's weights of this consumer
    int32_t* untold = nullptr;  // of the item whose tile of act is stored, and those who wait do not know yet
};

// Tells those that wait for the rows of act. Not at once after storing them, when the fence would wait for
// the stores while no product is under way, but a little into the next tile; at the latest before this block
// may itself wait for act.
template <typename Shape>
__device__ __forceinline__ void experts_tell(ExpertsConsumer<Shape>& me) {
    if (me.leader && me.untold != nullptr) {
        __threadfence();
        atomicAdd(me.untold, 1);
    }
    me.untold = nullptr;
}

// sums = weights x rows over all inputs. Returns the "empty" barrier of the last stage, whose weights of this
// consumer may serve as a buffer until it is told. copied: the rows came by cp.async.
template <bool Fp8, typename Shape, int N>
__device__ __forceinline__ uint32_t experts_multiply(float (&sums)[Shape::kBlocks][N / 2],
                                                     ExpertsConsumer<Shape>& me, int steps, bool copied) {
    uint32_t release = 0;
    // Also tells the compiler that nothing of the sums lives from one tile to the next.
#pragma unroll
    for (int block = 0; block < Shape::kBlocks; ++block) {
#pragma unroll
        for (int i = 0; i < N / 2; ++i) {
            sums[block][i] = 0;
        }
    }
    for (int step = 0; step < steps; ++step) {
        const uint32_t stage = me.memory + me.ring.stage * Shape::kStageBytes;
        const uint32_t mine = stage + me.index * Shape::kBlocks * Shape::kBlockBytes;
        if constexpr (!Shape::kOwnBuffer) {
            me.buffer = mine;
        }
        const uint64_t weights = mma_descriptor(mine);
        const uint64_t rows = mma_descriptor(stage + Shape::kWeightBytes);
        barrier_wait(me.ring.full(), me.ring.parity);
        if (copied) {
            fence_proxy_async();
        }
#pragma unroll
        for (int block = 0; block < Shape::kBlocks; ++block) {
            mma_pin(sums[block]);
        }
        mma_begin();
#pragma unroll
        for (int part = 0; part < kSwizzleRowBytes / kMmaStepBytes; ++part) {
#pragma unroll
            for (int block = 0; block < Shape::kBlocks; ++block) {
                mma_shared<Fp8>(sums[block],
                                weights + (part * kMmaStepBytes + block * Shape::kBlockBytes) / 16,
                                rows + part * kMmaStepBytes / 16, 1);
            }
        }
        mma_commit();
        if (step == 2) {
            experts_tell(me);
        }
        mma_wait<1>();
        if (release != 0 && me.leader) {
            barrier_arrive(release);
        }
        release = me.ring.empty();
        me.ring.advance();
    }
    experts_tell(me);
    mma_wait<0>();
#pragma unroll
    for (int block = 0; block < Shape::kBlocks; ++block) {
        mma_pin(sums[block]);
    }
    if constexpr (!Shape::kOwnBuffer) {
        group_barrier(1 + me.index, 128);  // before the first of these warps writes to the buffer
    }
    return release;
}

// The stages of a tile in which this consumer has no outputs.
template <typename Shape>
__device__ __forceinline__ void experts_pass(ExpertsConsumer<Shape>& me, int steps) {
    for (int step = 0; step < steps; ++step) {
        barrier_wait(me.ring.full(), me.ring.parity);
        group_barrier(1 + me.index, 128);  // no warp may be a round of the ring behind
        if (me.leader) {
            barrier_arrive(me.ring.empty());
        }
        me.ring.advance();
    }
}

// Where 64 outputs of a tile's rows go. Elements of out; columns past the end do not exist.
struct ExpertsTarget {
    uint8_t* out = nullptr;  // row 0 of the tile
    int64_t stride = 0;      // bytes
    int rows = 0;
    int column = 0;
    int columns = 0;
    uint32_t buffer = 0;  // shared memory
    int barrier = 0;      // of the consumer's threads
};

// [rows, 64] bfloat16: of each row 32 bytes by each warp, through 2 KiB of its own of the buffer, for 32 rows
// in turn with the next 32. Warps wait for nothing but themselves.
template <int N>
__device__ __forceinline__ void store_bf16_rows(const float (&values)[N / 2], float scale,
                                                const ExpertsTarget& to) {
    constexpr int kPieceBytes = 16 * 32;  // 16 rows of a warp
    constexpr int kPieces = 2;
    const int thread = static_cast<int>(threadIdx.x % 128);
    const int lane = thread % 32;
    const auto place = [&to, thread](int row, int half) {
        return to.buffer + thread / 32 * (2 * kPieces * kPieceBytes) + row * 32 +
               (half ^ ((row >> 2) & 1)) * 16;
    };
    const uint32_t put = place(lane / 16 * 8 + lane % 8, lane / 8 % 2);
    const uint32_t get = place(lane / 2, lane % 2);
    const int column = to.column + thread / 32 * 16 + lane % 2 * 8;
    const int rows = column < to.columns ? to.rows - lane / 2 : 0;
    uint8_t* out = to.out + lane / 2 * to.stride + column * 2;
#pragma unroll
    for (int first = 0; first < N / 16; first += kPieces) {
        const int buffer = first % (2 * kPieces) * kPieceBytes;
#pragma unroll
        for (int j = first; j < min(first + kPieces, N / 16); ++j) {
            uint32_t matrices[4];
#pragma unroll
            for (int m = 0; m < 4; ++m) {
                matrices[m] = pack_bf16(values[8 * j + 2 * m] * scale, values[8 * j + 2 * m + 1] * scale);
            }
            store_transposed(put + buffer + (j - first) * kPieceBytes, matrices);
        }
        __syncwarp();
#pragma unroll
        for (int j = first; j < min(first + kPieces, N / 16); ++j) {
            const uint4 raw = load_shared_16(get + buffer + (j - first) * kPieceBytes);
            if (16 * j < rows) {
                *reinterpret_cast<uint4*>(out) = raw;
            }
            out += 16 * to.stride;
        }
    }
    __syncwarp();
}

// [rows, 128] bfloat16 of two blocks whose weights' rows lie so that a warp's 16 of both are neighbours
// (down_pairs): of each row 64 bytes by each warp, 16 rows in turn with the next 16.
template <int N>
__device__ __forceinline__ void store_bf16_pairs(const float (&values)[2][N / 2], float scale,
                                                 const ExpertsTarget& to) {
    constexpr int kPieceBytes = 16 * 64;
    const int thread = static_cast<int>(threadIdx.x % 128);
    const int lane = thread % 32;
    const uint32_t buffer = to.buffer + thread / 32 * (2 * kPieceBytes);
    const auto place = [](int row, int piece) {
        return static_cast<uint32_t>(row * 64 + ((piece ^ ((row >> 1) & 3)) << 4));
    };
    const int put_row = lane / 16 * 8 + lane % 8;
    const uint32_t put[2] = {buffer + place(put_row, lane / 8 % 2),
                             buffer + place(put_row, 2 + lane / 8 % 2)};
    const uint32_t get = buffer + place(lane / 4, lane % 4);
    const int column = to.column + thread / 32 * 32 + lane % 4 * 8;
    const int rows = column < to.columns ? to.rows - lane / 4 : 0;
    uint8_t* out = to.out + lane / 4 * to.stride + column * 2;
#pragma unroll
    for (int j = 0; j < N / 16; ++j) {
        const int turn = j % 2 * kPieceBytes;
#pragma unroll
        for (int block = 0; block < 2; ++block) {
            uint32_t matrices[4];
#pragma unroll
            for (int m = 0; m < 4; ++m) {
                matrices[m] =
                    pack_bf16(values[block][8 * j + 2 * m] * scale, values[block][8 * j + 2 * m + 1] * scale);
            }
            store_transposed(put[block] + turn, matrices);
        }
        __syncwarp();
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const uint4 raw = load_shared_16(get + turn + half * (kPieceBytes / 2));
            if (16 * j + 8 * half < rows) {
                *reinterpret_cast<uint4*>(out) = raw;
            }
            out += 8 * to.stride;
        }
    }
    __syncwarp();
}

// SwiGLU, rounded to bfloat16, then e4m3. A thread's rows of weights r and r + 8 are neighbouring outputs.
template <int N>
__device__ __forceinline__ void store_act_fp8(const float (&gate)[N / 2], const float (&up)[N / 2],
                                              const ExpertsScales& scales, const ExpertsTarget& to) {
    const int thread = static_cast<int>(threadIdx.x % 128);
    const int lane = thread % 32;
    const auto place = [](int row, int piece) {
        return static_cast<uint32_t>(row * 64 + ((piece ^ ((row >> 1) & 3)) << 4));
    };
    const auto narrow = [&scales](float even, float odd) -> uint32_t {
        const uint32_t pair = pack_bf16(even, odd);
        return pack_e4m3(low_bf16(pair) * scales.inverse_output, high_bf16(pair) * scales.inverse_output);
    };
#pragma unroll
    for (int j = 0; j < N / 16; ++j) {
        uint32_t matrices[2];
#pragma unroll
        for (int m = 0; m < 2; ++m) {
            float h[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int at = 8 * j + 4 * m + i;
                h[i] = swiglu(gate[at] * scales.gate, up[at] * scales.up);
            }
            matrices[m] = narrow(h[0], h[2]) | narrow(h[1], h[3]) << 16;
        }
        store_transposed(to.buffer + place(16 * j + lane % 16, thread / 32), matrices);
    }
    group_barrier(to.barrier, 128);
    const int piece = thread % 4;
    const int column = to.column + piece * 16;
#pragma unroll
    for (int i = 0; i < (N + 31) / 32; ++i) {
        const int row = thread / 4 + 32 * i;
        if (row < to.rows && column < to.columns) {
            *reinterpret_cast<uint4*>(to.out + row * to.stride + column) =
                load_shared_16(to.buffer + place(row, piece));
        }
    }
}

// Few rows: straight from the registers. Rows of weights r and r + 8 are gate and up of one output.
template <bool Fp8, int N>
__device__ __forceinline__ void store_act_narrow(const float (&sums)[N / 2], const ExpertsScales& scales,
                                                 const ExpertsTarget& to) {
    const int thread = static_cast<int>(threadIdx.x % 128);
    const int column = to.column + thread / 32 * 8 + thread % 32 / 4;
#pragma unroll
    for (int j = 0; j < N / 8; ++j) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const int row = 8 * j + thread % 4 * 2 + i;
            const float h = swiglu(sums[4 * j + i] * scales.gate, sums[4 * j + 2 + i] * scales.up);
            if (row < to.rows && column < to.columns) {
                if constexpr (Fp8) {
                    to.out[row * to.stride + column] =
                        static_cast<uint8_t>(pack_e4m3(round_bf16(h) * scales.inverse_output, 0));
                } else {
                    *reinterpret_cast<__nv_bfloat16*>(to.out + row * to.stride + column * 2) =
                        __float2bfloat16_rn(h);
                }
            }
        }
    }
}
template <int N>
__device__ __forceinline__ void store_out_narrow(const float (&sums)[N / 2], float scale,
                                                 const ExpertsTarget& to) {
    const int thread = static_cast<int>(threadIdx.x % 128);
    const int column = to.column + thread / 32 * 16 + thread % 32 / 4;
#pragma unroll
    for (int i = 0; i < N / 2; ++i) {
        const int row = i / 4 * 8 + thread % 4 * 2 + i % 2;
        const int here = column + i / 2 % 2 * 8;
        if (row < to.rows && here < to.columns) {
            *reinterpret_cast<__nv_bfloat16*>(to.out + row * to.stride + here * 2) =
                __float2bfloat16_rn(sums[i] * scale);
        }
    }
}

template <bool Fp8, typename Shape, int N>
__device__ __forceinline__ void experts_store_act(const ExpertsArgs& args, const ExpertsTile& tile,
                                                  float (&sums)[Shape::kBlocks][N / 2],
                                                  const ExpertsScales& scales,
                                                  const ExpertsConsumer<Shape>& me) {
    const int64_t stride = args.act_stride * (Fp8 ? 1 : 2);
    const ExpertsSide& side = experts_side(args, tile);
    const ExpertsTarget to{.out = args.act + tile.row * stride,
                           .stride = stride,
                           .rows = tile.rows,
                           .column = tile.tile * Shape::kOutputs + me.index * Shape::kOutputs / 2,
                           .columns = side.width,
                           .buffer = me.buffer,
                           .barrier = 1 + me.index};
    if constexpr (Shape::kBlocks == 1) {
        store_act_narrow<Fp8, N>(sums[0], scales, to);
    } else if constexpr (Fp8) {
        store_act_fp8<N>(sums[0], sums[1], scales, to);
    } else {
#pragma unroll
        for (int i = 0; i < N / 2; ++i) {
            sums[0][i] = swiglu(sums[0][i], sums[1][i]);
        }
        store_bf16_rows<N>(sums[0], 1.0f, to);
    }
}

template <typename Shape, int N>
__device__ __forceinline__ void experts_store_out(const ExpertsArgs& args, const ExpertsTile& tile,
                                                  const float (&sums)[Shape::kBlocks][N / 2], float scale,
                                                  const ExpertsConsumer<Shape>& me) {
    const int64_t stride = static_cast<int64_t>(args.hidden) * 2;
    ExpertsTarget to{.out = static_cast<uint8_t*>(args.out) + tile.row * stride,
                     .stride = stride,
                     .rows = tile.rows,
                     .column = tile.tile * Shape::kWeightRows + me.index * Shape::kWeightRows / 2,
                     .columns = args.hidden,
                     .buffer = me.buffer,
                     .barrier = 1 + me.index};
    if constexpr (Shape::kBlocks == 1) {
        store_out_narrow<N>(sums[0], scale, to);
    } else if (args.down_pairs) {
        store_bf16_pairs<N>(sums, scale, to);
    } else {
#pragma unroll
        for (int block = 0; block < Shape::kBlocks; ++block) {
            store_bf16_rows<N>(sums[block], scale, to);
            to.column += 64;
        }
    }
}

template <bool Fp8, typename Shape, int N>
__device__ __forceinline__ void experts_consume_tile(const ExpertsArgs& args, const ExpertsTile& tile,
                                                     ExpertsConsumer<Shape>& me) {
    const ExpertsSide& side = experts_side(args, tile);
    const ExpertsScales scales = experts_scales<Fp8>(side, tile);
    const int inputs = tile.phase == 0 ? args.hidden : side.width;
    const int steps = (inputs * (Fp8 ? 1 : 2) + kSwizzleRowBytes - 1) / kSwizzleRowBytes;
    if (tile.phase == 0 && tile.tile * Shape::kOutputs + me.index * Shape::kOutputs / 2 >= side.width) {
        wait_for_previous_kernel();
        experts_tell(me);
        experts_pass(me, steps);
        me.untold = args.ready + tile.item;
        return;
    }
    float sums[Shape::kBlocks][N / 2];
    const uint32_t release =
        experts_multiply<Fp8, Shape, N>(sums, me, steps, tile.phase == 0 && !args.x_sorted);
    if (Shape::kOwnBuffer && me.leader) {
        barrier_arrive(release);
    }
    wait_for_previous_kernel();  // of a shared tile that was begun before its end
    if (tile.phase == 0) {
        experts_store_act<Fp8, Shape, N>(args, tile, sums, scales, me);
        me.untold = args.ready + tile.item;
    } else {
        experts_store_out<Shape, N>(args, tile, sums, scales.gate, me);
    }
    if constexpr (Shape::kOwnBuffer) {
        if (tile.phase == 0) {
            group_barrier(1 + me.index, 128);  // the leader tells of all threads' stores
        }
    } else {
        fence_proxy_async();
        group_barrier(1 + me.index, 128);
        if (me.leader) {
            barrier_arrive(release);
        }
    }
}

// The instruction's width N is part of its text.
template <bool Fp8, typename Shape, int N>
__device__ __forceinline__ void experts_consume_width(const ExpertsArgs& args, const ExpertsTile& tile,
                                                      ExpertsConsumer<Shape>& me) {
    if constexpr (N < Shape::kTileMax) {
        if (tile.columns > N) {
            experts_consume_width<Fp8, Shape, N + 16>(args, tile, me);
            return;
        }
    }
    experts_consume_tile<Fp8, Shape, N>(args, tile, me);
}

template <bool Fp8, typename Shape>
__device__ __forceinline__ void experts_consume(const ExpertsArgs& args, const ExpertsMemory<Shape>& memory,
                                                int consumer) {
    ExpertsConsumer<Shape> me{.memory = memory.address,
                              .ring = memory.stages(),
                              .index = consumer,
                              .leader = threadIdx.x % 128 == 0,
                              .buffer = memory.address + Shape::kBuffers + consumer * Shape::kResultBytes};
    ExpertsRing<Shape::kSlots> tiles = memory.tiles();
    for (;;) {
        const ExpertsTile tile = acquire_tile(memory, tiles);
        release_tile(tiles);
        tiles.advance();
        if (tile.phase != 0) {
            experts_tell(me);
        }
        if (tile.phase < 0) {
            return;
        }
        experts_consume_width<Fp8, Shape, Shape::kTileMin>(args, tile, me);
    }
}

}  // namespace tessera::cuda

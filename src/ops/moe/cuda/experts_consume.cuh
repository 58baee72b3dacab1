// The consuming warpgroups of the experts' kernel: products, SwiGLU, stores.
#pragma once

#include <cuda_bf16.h>

#include "ops/common/cuda/cache_policy.cuh"
#include "ops/common/cuda/convert.cuh"
#include "ops/common/cuda/dependent_launch.cuh"
#include "ops/common/cuda/shared_access.cuh"
#include "ops/common/cuda/wgmma_shapes.cuh"
#include "ops/moe/cuda/act_pairs.cuh"
#include "ops/moe/cuda/experts.cuh"
#include "ops/moe/cuda/swiglu.cuh"

namespace tessera::cuda {

// As store_transposed(), of one, two or four matrices, if rows > 0: a warp's instructions are the same
// without.
__device__ __forceinline__ void store_transposed_if(int rows, uint32_t address,
                                                    const uint32_t (&matrices)[4]) {
    asm volatile(
        "{\n.reg .pred there;\nsetp.gt.s32 there, %5, 0;\n"
        "@there stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};\n}\n" ::"r"(address),
        "r"(matrices[0]), "r"(matrices[1]), "r"(matrices[2]), "r"(matrices[3]), "r"(rows)
        : "memory");
}
__device__ __forceinline__ void store_transposed_if(int rows, uint32_t address,
                                                    const uint32_t (&matrices)[2]) {
    asm volatile(
        "{\n.reg .pred there;\nsetp.gt.s32 there, %3, 0;\n"
        "@there stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1, %2};\n}\n" ::"r"(address),
        "r"(matrices[0]), "r"(matrices[1]), "r"(rows)
        : "memory");
}

__device__ __forceinline__ void store_transposed_if(int rows, uint32_t address, uint32_t matrix) {
    asm volatile(
        "{\n.reg .pred there;\nsetp.gt.s32 there, %2, 0;\n"
        "@there stmatrix.sync.aligned.m8n8.x1.trans.shared.b16 [%0], {%1};\n}\n" ::"r"(address),
        "r"(matrix), "r"(rows)
        : "memory");
}

// What a consumer knows beside the tile.
template <typename Shape>
struct ExpertsConsumer {
    uint32_t memory = 0;  // begin of the stages
    ExpertsRing<Shape::kStages> ring;
    int index = 0;            // 0, 1 or 2
    uint64_t out_policy = 0;  // of the level-2 cache
    int turns = 0;            // tiles so far that this block's consumers took in turn
    bool leader = false;
    uint32_t buffer =
        0;            // of kResultBytes: without one of its own, the last stage's weights of this consumer
    int untold = -1;  // the item whose tile of act is stored, and those who wait do not know yet
};

// Tells those that wait for the rows of act. Not at once after storing them, when the fence would wait for
// the stores while no product is under way, but a little into the next tile; at the latest before this block
// may itself wait for act.
template <typename Shape>
__device__ __forceinline__ void experts_tell(const ExpertsArgs& args, ExpertsConsumer<Shape>& me) {
    if (me.leader && me.untold >= 0) {
        __threadfence();
        atomicAdd(args.ready + me.untold, 1);
    }
    me.untold = -1;
}

// In turn, a consumer knows the ring only from its own tiles on: it begins one when the other has seen all
// stages of the tile before.
template <typename Shape>
__device__ __forceinline__ void experts_wait_for_turn(const ExpertsConsumer<Shape>& me) {
    group_barrier(3 + me.index, 256);
}
template <typename Shape>
__device__ __forceinline__ void experts_give_turn(const ExpertsConsumer<Shape>& me) {
    group_barrier_arrive(3 + (me.index ^ 1), 256);
}

// sums = weights x rows over all inputs. Returns the "empty" barrier of the last stage, whose weights of this
// consumer may serve as a buffer until it is told; 0 without steps, or if it is told already. copied: the
// rows came by cp.async.
template <bool Fp8, typename Shape, int N>
__device__ __forceinline__ uint32_t experts_multiply(const ExpertsArgs& args,
                                                     float (&sums)[Shape::kHeld][N / 2],
                                                     ExpertsConsumer<Shape>& me, int steps, bool copied) {
    uint32_t release = 0;
    const uint32_t first = Shape::kTurns ? 0 : me.index * Shape::kBlocks * Shape::kBlockBytes;
    if (Shape::kTurns && me.turns > 1) {
        experts_wait_for_turn(me);
    }
    // Also tells the compiler that nothing of the sums lives from one tile to the next.
#pragma unroll
    for (int block = 0; block < Shape::kHeld; ++block) {
#pragma unroll
        for (int i = 0; i < N / 2; ++i) {
            sums[block][i] = 0;
        }
    }
    for (int step = 0; step < steps; ++step) {
        const uint32_t stage = me.memory + me.ring.stage * Shape::kStageBytes;
        const uint32_t mine = stage + first;
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
        for (int block = 0; block < Shape::kHeld; ++block) {
            mma_pin(sums[block]);
        }
        mma_begin();
#pragma unroll
        for (int part = 0; part < kSwizzleRowBytes / kMmaStepBytes; ++part) {
#pragma unroll
            for (int block = 0; block < Shape::kHeld; ++block) {
                mma_shared<Fp8>(sums[block],
                                weights + (part * kMmaStepBytes + block * Shape::kBlockBytes) / 16,
                                rows + part * kMmaStepBytes / 16, 1);
            }
        }
        mma_commit();
        if (step == 2) {
            experts_tell(args, me);
        }
        if (Shape::kTurns && step + 1 == steps) {
            experts_give_turn(me);
        }
        if constexpr (Shape::kAtOnce) {
            mma_wait<0>();
            if (me.leader) {
                barrier_arrive(me.ring.empty());
            }
        } else {
            mma_wait<1>();
            if (release != 0 && me.leader) {
                barrier_arrive(release);
            }
            release = me.ring.empty();
        }
        me.ring.advance();
    }
    experts_tell(args, me);
    mma_wait<0>();
#pragma unroll
    for (int block = 0; block < Shape::kHeld; ++block) {
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
    uint64_t policy = 0;  // of the level-2 cache

    // Whether this consumer goes through the code of the 16 rows `piece`: without rows only through one of
    // them, others elsewhere. Registers are few: nothing of this is kept.
    __device__ __forceinline__ bool has_piece(int piece) const {
        if (rows > 0) {
            return true;
        }
        uint32_t block;
        asm volatile("mov.u32 %0, %ctaid.x;" : "=r"(block));
        return (block * 2 + threadIdx.x / 128) % 16 == static_cast<uint32_t>(piece);
    }
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
        if (!to.has_piece(first)) {
            out += kPieces * 16 * to.stride;
            continue;
        }
        const int buffer = first % (2 * kPieces) * kPieceBytes;
#pragma unroll
        for (int j = first; j < min(first + kPieces, N / 16); ++j) {
            uint32_t matrices[4];
#pragma unroll
            for (int m = 0; m < 4; ++m) {
                matrices[m] = pack_bf16(values[8 * j + 2 * m] * scale, values[8 * j + 2 * m + 1] * scale);
            }
            store_transposed_if(to.rows, put + buffer + (j - first) * kPieceBytes, matrices);
        }
        __syncwarp();
#pragma unroll
        for (int j = first; j < min(first + kPieces, N / 16); ++j) {
            if (16 * j < rows) {
                *reinterpret_cast<uint4*>(out) = load_shared_16(get + buffer + (j - first) * kPieceBytes);
            }
            out += 16 * to.stride;
        }
    }
    __syncwarp();
}

// [rows, 128] bfloat16 of two blocks whose weights' rows lie so that a warp's 16 of both are neighbours
// (down_pairs): of each row 64 bytes by each warp, 16 rows in turn with the next 16.
template <int N, bool Policy>
__device__ __forceinline__ void store_bf16_pairs(const float (&low)[N / 2], const float (&high)[N / 2],
                                                 float scale, const ExpertsTarget& to) {
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
        if (!to.has_piece(j)) {
            out += 16 * to.stride;
            continue;
        }
        const int turn = j % 2 * kPieceBytes;
#pragma unroll
        for (int block = 0; block < 2; ++block) {
            const float(&values)[N / 2] = block == 0 ? low : high;
            uint32_t matrices[4];
#pragma unroll
            for (int m = 0; m < 4; ++m) {
                matrices[m] = pack_bf16(values[8 * j + 2 * m] * scale, values[8 * j + 2 * m + 1] * scale);
            }
            store_transposed_if(to.rows, put[block] + turn, matrices);
        }
        __syncwarp();
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            if (16 * j + 8 * half < rows) {
                const uint4 raw = load_shared_16(get + turn + half * (kPieceBytes / 2));
                if constexpr (Policy) {
                    store_with_policy(out, raw, to.policy);
                } else {
                    *reinterpret_cast<uint4*>(out) = raw;
                }
            }
            out += 8 * to.stride;
        }
    }
    __syncwarp();
}

// [rows, 64] bfloat16: of each row 128 bytes by 8 neighbouring threads, 32 rows in turn with the next 32.
template <int N>
__device__ __forceinline__ void store_bf16_lines(const float (&values)[N / 2], float scale,
                                                 const ExpertsTarget& to) {
    constexpr int kRows = 32;
    const int thread = static_cast<int>(threadIdx.x % 128);
    const int lane = thread % 32;
    const int put_row = lane / 16 * 8 + lane % 8;
    const int put_piece = thread / 32 * 2 + lane / 8 % 2;
    const int row = thread / 8;
    const int column = to.column + thread % 8 * 8;
    const int rows = column < to.columns ? to.rows - row : 0;
    uint8_t* out = to.out + row * to.stride + column * 2;
#pragma unroll
    for (int first = 0; first < N; first += kRows) {
        if (!to.has_piece(first / 16)) {
            out += kRows * to.stride;
            continue;
        }
        const uint32_t buffer = to.buffer + first / kRows % 2 * (kRows * 128);
#pragma unroll
        for (int j = first / 16; j < min(first + kRows, N) / 16; ++j) {
            uint32_t matrices[4];
#pragma unroll
            for (int m = 0; m < 4; ++m) {
                matrices[m] = pack_bf16(values[8 * j + 2 * m] * scale, values[8 * j + 2 * m + 1] * scale);
            }
            store_transposed_if(to.rows, buffer + swizzle_128(16 * j - first + put_row, put_piece), matrices);
        }
        group_barrier(to.barrier, 128);
#pragma unroll
        for (int i = 0; i < kRows / 16; ++i) {
            if (first + 16 * i < min(rows, N)) {
                *reinterpret_cast<uint4*>(out) =
                    load_shared_16(buffer + swizzle_128(16 * i + row, thread % 8));
            }
            out += 16 * to.stride;
        }
    }
    group_barrier(to.barrier, 128);
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
        if (!to.has_piece(j)) {
            continue;
        }
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
        store_transposed_if(to.rows, to.buffer + place(16 * j + lane % 16, thread / 32), matrices);
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
// The same of 32 outputs through shared memory.
template <int N>
__device__ __forceinline__ void store_act_pairs(const float (&sums)[N / 2], const ExpertsScales& scales,
                                                const ExpertsTarget& to) {
    const int thread = static_cast<int>(threadIdx.x % 128);
#pragma unroll
    for (int j = 0; j < N / 16; ++j) {
        if (to.has_piece(j)) {
            store_transposed_if(to.rows, to.buffer + act_pairs_put(j),
                                act_pairs_matrix(sums + 8 * j, scales));
        }
    }
    group_barrier(to.barrier, 128);
    const int half = thread % 2;
    const int column = to.column + half * 16;
#pragma unroll
    for (int i = 0; i < (N + 127) / 128; ++i) {
        const int row = thread / 2 + 64 * i;  // of the buffer
        const int token = act_pairs_token(row);
        if (token < to.rows && column < to.columns) {
            const ActPair pair = act_pairs_get(to.buffer, row, half);
            uint8_t* out = to.out + token * to.stride + column;
            *reinterpret_cast<uint4*>(out) = pair.even;
            if (token + 1 < to.rows) {
                *reinterpret_cast<uint4*>(out + to.stride) = pair.odd;
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

// Of a tile's outputs, of which consumers have the same share, or one has all.
template <typename Shape>
__device__ __forceinline__ int experts_column(const ExpertsTile& tile, const ExpertsConsumer<Shape>& me,
                                              int outputs) {
    return tile.tile * outputs + (Shape::kTurns ? 0 : me.index * (outputs / Shape::kConsumers));
}

template <bool Fp8, typename Shape, int N>
__device__ __forceinline__ void experts_store_act(const ExpertsArgs& args, const ExpertsTile& tile,
                                                  float (&sums)[Shape::kHeld][N / 2],
                                                  const ExpertsScales& scales,
                                                  const ExpertsConsumer<Shape>& me) {
    const int64_t stride = args.act_stride * (Fp8 ? 1 : 2);
    const ExpertsSide& side = experts_side(args, tile);
    ExpertsTarget to{.out = args.act + tile.row * stride,
                     .stride = stride,
                     .rows = tile.rows,
                     .column = experts_column(tile, me, Shape::kOutputs),
                     .columns = side.width,
                     .buffer = me.buffer,
                     .barrier = 1 + me.index};
    if constexpr (Shape::kConsumers == 3) {
        store_act_pairs<N>(sums[0], scales, to);
    } else if constexpr (Shape::kBlocks == 1) {
        store_act_narrow<Fp8, N>(sums[0], scales, to);
    } else {
#pragma unroll
        for (int block = 0; block < Shape::kHeld; block += 2) {
            if constexpr (Fp8) {
                store_act_fp8<N>(sums[block], sums[block + 1], scales, to);
                to.buffer += N * 64;
            } else {
#pragma unroll
                for (int i = 0; i < N / 2; ++i) {
                    sums[block][i] = swiglu(sums[block][i], sums[block + 1][i]);
                }
                store_bf16_rows<N>(sums[block], 1.0f, to);
            }
            to.column += 64;
        }
    }
}

template <typename Shape, int N>
__device__ __forceinline__ void experts_store_out(const ExpertsArgs& args, const ExpertsTile& tile,
                                                  const float (&sums)[Shape::kHeld][N / 2], float scale,
                                                  const ExpertsConsumer<Shape>& me) {
    const int64_t stride = static_cast<int64_t>(args.hidden) * 2;
    ExpertsTarget to{.out = static_cast<uint8_t*>(args.out) + tile.row * stride,
                     .stride = stride,
                     .rows = tile.rows,
                     .column = experts_column(tile, me, Shape::kWeightRows),
                     .columns = args.hidden,
                     .buffer = me.buffer,
                     .barrier = 1 + me.index,
                     .policy = me.out_policy};
    if constexpr (Shape::kConsumers == 3) {
        store_bf16_lines<N>(sums[0], scale, to);
    } else if constexpr (Shape::kBlocks == 1) {
        store_out_narrow<N>(sums[0], scale, to);
    } else if (args.down_pairs) {
#pragma unroll
        for (int block = 0; block < Shape::kHeld; block += 2) {
            store_bf16_pairs<N, Shape::kTurns>(sums[block], sums[block + 1], scale, to);
            to.column += 128;
        }
    } else {
#pragma unroll
        for (int block = 0; block < Shape::kHeld; ++block) {
            store_bf16_rows<N>(sums[block], scale, to);
            to.column += 64;
        }
    }
}

// Without steps and rows nothing is read or written, but the instructions of the stores are in the cache
// then.
template <bool Fp8, typename Shape, int N>
__device__ __forceinline__ void experts_consume_tile(const ExpertsArgs& args, const ExpertsTile& tile,
                                                     const ExpertsScales& scales, int steps,
                                                     ExpertsConsumer<Shape>& me) {
    if (!Shape::kTurns && steps > 0 && tile.phase == 0 &&
        experts_column(tile, me, Shape::kOutputs) >= experts_side(args, tile).width) {
        wait_for_previous_kernel();
        experts_tell(args, me);
        experts_pass(me, steps);
        me.untold = tile.rows > 0 ? tile.item : -1;
        return;
    }
    float sums[Shape::kHeld][N / 2];
    const uint32_t release =
        experts_multiply<Fp8, Shape, N>(args, sums, me, steps, tile.phase == 0 && !args.x_sorted);
    const bool real = steps > 0;
    if (Shape::kOwnBuffer && !Shape::kAtOnce && me.leader && real) {
        barrier_arrive(release);
    }
    if (real) {
        wait_for_previous_kernel();  // of a shared tile that was begun before its end
    }
    if (tile.phase == 0) {
        experts_store_act<Fp8, Shape, N>(args, tile, sums, scales, me);
        me.untold = tile.rows > 0 ? tile.item : -1;  // nobody waits for no rows
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
        if (me.leader && real) {
            barrier_arrive(release);
        }
    }
    if constexpr (Shape::kTurns) {
        experts_tell(args, me);  // the other consumer multiplies meanwhile
    }
}

// The instruction's width is part of its text: one of First to Last. By halves: the code of each is long, and
// a jump over it waits for instructions, some 150 clocks.
template <bool Fp8, typename Shape, int First, int Last>
__device__ __forceinline__ void experts_consume_width(const ExpertsArgs& args, const ExpertsTile& tile,
                                                      const ExpertsScales& scales, int steps,
                                                      ExpertsConsumer<Shape>& me) {
    if constexpr (First == Last) {
        experts_consume_tile<Fp8, Shape, First>(args, tile, scales, steps, me);
    } else {
        constexpr int kMiddle = First + (Last - First) / 32 * 16;
        if (tile.columns > kMiddle) {
            experts_consume_width<Fp8, Shape, kMiddle + 16, Last>(args, tile, scales, steps, me);
        } else {
            experts_consume_width<Fp8, Shape, First, kMiddle>(args, tile, scales, steps, me);
        }
    }
}

// How wide this block's first tiles may be. Some take neighbours of the usual width, so that their
// instructions are in the level-2 cache.
template <typename Shape>
__device__ __forceinline__ int experts_expected_columns(const ExpertsArgs& args, const ExpertsLook& look) {
    const int gates = (args.shared.width + Shape::kOutputs - 1) / Shape::kOutputs * args.shared_items;
    const auto block = static_cast<int>(blockIdx.x);
    const int apart = block / 8 % 4 == 1 ? 16 : block / 8 % 4 == 3 ? -16 : 0;
    const int columns = block < gates ? look.first_columns : look.columns + apart;
    return max(Shape::kTileMin, min(columns, Shape::kTileMax));
}

// While the plan is made, and the first weights are under way, a tile without steps: the stores' long
// straight code comes from memory, which has a queue by the first tile's end. A block does so for one of the
// two phases, by its number: with 176 rows each takes 9 us.
template <bool Fp8, typename Shape>
__device__ __forceinline__ void experts_consume(const ExpertsArgs& args, const ExpertsMemory<Shape>& memory,
                                                const ExpertsLook& look, int consumer) {
    ExpertsConsumer<Shape> me{.memory = memory.address,
                              .ring = memory.stages(),
                              .index = consumer,
                              .leader = threadIdx.x % 128 == 0,
                              .buffer = memory.address + Shape::kBuffers + consumer * Shape::kResultBytes};
    ExpertsRing<Shape::kSlots> tiles = memory.tiles();
    if constexpr (Shape::kTurns) {
        me.out_policy = look.keep ? policy_to_keep() : policy_as_usual();
    }
    int trials = look.columns > 0 ? 1 : 0;
    for (;;) {
        ExpertsTile tile;
        ExpertsScales scales;
        int steps = 0;
        if (trials > 0) {
            --trials;
            tile = {.phase = static_cast<int>(blockIdx.x) / 32 % 2,
                    .columns = experts_expected_columns<Shape>(args, look)};
        } else {
            tile = acquire_tile(memory, tiles);
            scales = *reinterpret_cast<const ExpertsScales*>(memory.scales(tiles.stage));
            release_tile(tiles);
            tiles.advance();
            if (tile.phase != 0) {
                experts_tell(args, me);
            }
            if (tile.phase < 0) {
                return;
            }
            steps = (experts_input_bytes<Fp8>(args, tile) + kSwizzleRowBytes - 1) / kSwizzleRowBytes;
            if (Shape::kTurns && me.turns++ % 2 != me.index) {
                me.ring.advance(steps);
                continue;
            }
        }
        experts_consume_width<Fp8, Shape, Shape::kTileMin, Shape::kTileMax>(args, tile, scales, steps, me);
    }
}

}  // namespace tessera::cuda

// The producing warps of the experts' kernel: one takes tiles from the list, one brings the weights, two
// bring the tokens' rows.
#pragma once

#include <cuda_bf16.h>

#include "ops/common/cuda/dependent_launch.cuh"
#include "ops/moe/cuda/experts.cuh"

namespace tessera::cuda {

__device__ __forceinline__ int load_acquire(const int32_t* from) {
    int value;
    asm volatile("ld.acquire.gpu.global.b32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
    return value;
}

// The item `index` of the shared ones and then the routed ones, as a tile without place.
__device__ __forceinline__ ExpertsTile experts_item(const ExpertsArgs& args, int index) {
    ExpertsTile tile{.item = index};
    if (index < args.shared_items) {
        const int first = index * args.shared_rows;
        tile.shared = 1;
        tile.row = args.shared_row + first;
        tile.rows = min(args.shared_rows, args.tokens - first);
    } else {
        const int4 item = *reinterpret_cast<const int4*>(args.items + (index - args.shared_items));
        tile.expert = item.x;
        tile.row = item.y;
        tile.rows = item.z;
    }
    return tile;
}

// How many tiles there are.
template <typename Shape>
struct ExpertsList {
    int gate_tiles = 0;  // of a routed item
    int shared_gate_tiles = 0;
    int down_tiles = 0;
    int shared_gates = 0;  // of all shared items
    int gates = 0;
    int downs = 0;

    __device__ __forceinline__ ExpertsList(const ExpertsArgs& args, int routed_items)
        : gate_tiles((args.routed.width + Shape::kOutputs - 1) / Shape::kOutputs),
          shared_gate_tiles((args.shared.width + Shape::kOutputs - 1) / Shape::kOutputs),
          down_tiles((args.hidden + Shape::kWeightRows - 1) / Shape::kWeightRows),
          shared_gates(args.shared_items * shared_gate_tiles),
          gates(shared_gates + routed_items * gate_tiles),
          downs((args.shared_items + routed_items) * down_tiles) {}

    // All gate and up tiles, then all down tiles, `run` at once; within each by item.
    __device__ __forceinline__ ExpertsTile tile(const ExpertsArgs& args, int index, int run) const {
        int item = 0;
        int place = 0;
        if ((index - gates) * run >= downs) {
            return {};
        }
        if (index >= gates) {
            item = (index - gates) * run / down_tiles;
            place = (index - gates) * run % down_tiles;
        } else if (index < shared_gates) {
            item = index / shared_gate_tiles;
            place = index % shared_gate_tiles;
        } else {
            item = args.shared_items + (index - shared_gates) / gate_tiles;
            place = (index - shared_gates) % gate_tiles;
        }
        ExpertsTile tile = experts_item(args, item);
        tile.phase = index >= gates ? 1 : 0;
        tile.tile = place;
        tile.columns = max((tile.rows + 15) / 16 * 16, Shape::kTileMin);
        return tile;
    }
};

// The two warps copy so many rows at once, with 8 threads each.
inline constexpr int kCopyRows = kExpertsRowWarps * 32 / 8;
// A thread's own rows have their offsets side by side, four of them in one load.
template <typename Shape>
inline constexpr bool kOffsetsByFour = Shape::kTileMax % (4 * kCopyRows) == 0;

template <typename Shape>
__device__ __forceinline__ int experts_offset_place(int row) {
    return kOffsetsByFour<Shape> ? row % kCopyRows * (Shape::kTileMax / kCopyRows) + row / kCopyRows : row;
}

// The scale that lane 0, 1 or 2 brings for a tile: gate's, up's and the next input's; of down its own and its
// input's.
__device__ __forceinline__ float experts_raw_scale(const ExpertsArgs& args, const ExpertsTile& tile,
                                                   int lane) {
    const ExpertsSide& side = experts_side(args, tile);
    if (tile.phase == 0) {
        return lane < 2 ? side.gate_up_scale[2 * tile.expert + lane] : side.down_input_scale[tile.expert];
    }
    return lane == 0 ? side.down_scale[tile.expert] : side.down_input_scale[tile.expert];
}
// The lane's element of ExpertsScales.
__device__ __forceinline__ float experts_scale(const ExpertsArgs& args, const ExpertsTile& tile, int lane,
                                               float raw) {
    const float product = raw * __shfl_xor_sync(0xFFFFFFFFu, raw, 1);
    return tile.phase != 0 ? product : lane < 2 ? raw * experts_side(args, tile).input_scale : __frcp_rn(raw);
}

// With the tile go its scales, for which a consumer would wait between two tiles.
template <bool Fp8, typename Shape>
__device__ __forceinline__ void experts_publish(const ExpertsArgs& args, const ExpertsMemory<Shape>& memory,
                                                ExpertsRing<Shape::kSlots>& tiles, const ExpertsTile& tile) {
    const int lane = static_cast<int>(threadIdx.x % 32);
    barrier_wait(tiles.empty(), tiles.parity ^ 1);
    float scale = 1;
    if (Fp8 && tile.phase >= 0) {
        scale = experts_raw_scale(args, tile, lane);  // on its way beside the list of rows
    }
    if (lane == 0) {
        *memory.tile(tiles.stage) = tile;
    }
    if (tile.phase == 0 && !args.x_sorted) {
        int32_t* offsets = memory.row_offsets(tiles.stage);
        for (int i = lane; i < tile.rows; i += 32) {
            const int token =
                tile.shared != 0 ? tile.row - args.shared_row + i : args.row_source[tile.row + i];
            offsets[experts_offset_place<Shape>(i)] = token * args.x_stride;
        }
    }
    if constexpr (Shape::kRowScales) {
        for (int i = lane; tile.phase == 0 && i < tile.rows; i += 32) {
            memory.row_scales(tiles.stage)[i] = args.x_scale[args.row_source[tile.row + i]];
        }
    }
    if constexpr (!Shape::kRowScales) {
        if constexpr (Fp8) {
            scale = experts_scale(args, tile, lane, scale);
        }
        if (lane < 4) {
            memory.scales(tiles.stage)[lane] = scale;
        }
    }
    __syncwarp();
    barrier_arrive_for_all(tiles.full(), lane == 0);
    tiles.advance();
}

// One warp. A block's first tile is its own number, further ones come from the common counter: taken when the
// one before the last is loaded, as late as hides this, so that the blocks end together. Down tiles may be
// few stages each: of these some at once, and while further ones are left.
template <bool Fp8 = false, typename Shape>
__device__ __forceinline__ void experts_schedule(const ExpertsArgs& args, const ExpertsMemory<Shape>& memory,
                                                 const ExpertsLook& look = {}) {
    ExpertsRing<Shape::kSlots> tiles = memory.tiles();
    const int first = static_cast<int>(blockIdx.x);
    bool early = false;
    if constexpr (!Shape::kRowScales) {
        // A first tile of the shared expert needs no plan. int4: it is another launch's.
        const ExpertsList<Shape> shared(args, 0);
        early = first < shared.shared_gates;
        if (early) {
            experts_publish<Fp8>(args, memory, tiles, shared.tile(args, first, 1));
        }
    }
    wait_for_previous_kernel();
    const ExpertsList<Shape> list(args, *args.routed_items);
    ExpertsTile tile = list.tile(args, first, look.run);
    int left = 0;  // tiles that are published, the one under way among them
    for (;;) {
        if (!early) {
            experts_publish<Fp8>(args, memory, tiles, tile);
        }
        early = false;
        if (tile.phase < 0) {
            return;
        }
        ++left;
        ++tile.tile;
        if (tile.phase == 1 && tile.tile % look.run != 0) {
            continue;
        }
        const int ahead = tile.phase == 1 ? look.ahead : 1;
        for (left = min(left, Shape::kSlots); left > ahead; --left) {
            const int round = tiles.stage < left ? 1 : 0;  // the slot's before this one
            barrier_wait(tiles.empty() + 8 * (round * Shape::kSlots - left), tiles.parity ^ round);
        }
        int next = 0;
        if (threadIdx.x % 32 == 0) {
            next = atomicAdd(args.next_tile, 1);
        }
        next = __shfl_sync(0xFFFFFFFFu, next, 0) + static_cast<int>(gridDim.x);
        tile = list.tile(args, next, look.run);
        if constexpr (Shape::kRowScales) {
            // int4 alone: whether act is known to be there. Its load and the item's wait together.
            if (tile.phase == 1) {
                tile.shared = load_acquire(args.ready + tile.item);
            }
        }
    }
}

// A block's first tile is its own number. One of the shared expert needs no plan. int4: it is another
// launch's.
template <typename Shape>
__device__ __forceinline__ ExpertsTile experts_first_tile(const ExpertsArgs& args, const ExpertsLook& look) {
    const int first = static_cast<int>(blockIdx.x);
    if constexpr (!Shape::kRowScales) {
        const ExpertsList<Shape> shared(args, 0);
        if (first < shared.shared_gates) {
            return shared.tile(args, first, 1);
        }
    }
    wait_for_previous_kernel();
    return ExpertsList<Shape>(args, *args.routed_items).tile(args, first, look.run);
}

// One thread. The first tile's weights do not wait for its list of rows, if these are few.
template <bool Fp8, typename Shape>
__device__ __forceinline__ void experts_bring_weights(const ExpertsArgs& args,
                                                      const ExpertsMemory<Shape>& memory,
                                                      const ExpertsLook& look) {
    constexpr int kStep = kSwizzleRowBytes / (Fp8 ? 1 : 2);
    constexpr bool kEager = Shape::kTileMax <= 64;  // else registers are too few
    ExpertsRing<Shape::kStages> stages = memory.stages();
    ExpertsRing<Shape::kSlots> tiles = memory.tiles();
    for (bool first = true;; first = false) {
        const ExpertsTile tile =
            kEager && first ? experts_first_tile<Shape>(args, look) : acquire_tile(memory, tiles);
        barrier_arrive(tiles.empty());
        tiles.advance();
        if (tile.phase < 0) {
            return;
        }
        const ExpertsSide& side = experts_side(args, tile);
        const int steps = (experts_input_bytes<Fp8>(args, tile) + kSwizzleRowBytes - 1) / kSwizzleRowBytes;
        const int first_row = tile.expert * args.hidden + tile.tile * Shape::kWeightRows;
        for (int step = 0; step < steps; ++step) {
            const uint32_t to = memory.address + stages.stage * Shape::kStageBytes;
            barrier_wait(stages.empty(), stages.parity ^ 1);
            barrier_arrive_expect(stages.full(), Shape::kWeightBytes);
            if (tile.phase == 1 && Shape::kBlocks == 2 && args.down_pairs) {
#pragma unroll
                for (int half = 0; half < Shape::kBlocks; ++half) {
                    copy_box(to + half * 2 * Shape::kBlockBytes, &side.down,
                             {step * kStep, 0, 0, 0, first_row / 128 + half}, stages.full());
                }
            } else if (tile.phase == 1) {
#pragma unroll
                for (int half = 0; half < Shape::kBlocks; ++half) {
                    copy_box(to + half * 2 * Shape::kBlockBytes, &side.down, step * kStep,
                             first_row + 128 * half, stages.full());
                }
            } else if constexpr (Shape::kBlocks == 1) {
                copy_box(to, &side.gate_up, {step * kStep, 0, 0, tile.tile * 8, tile.expert}, stages.full());
            } else {
#pragma unroll
                for (int block = 0; block < 4; ++block) {
                    copy_box(to + block * Shape::kBlockBytes, &side.gate_up,
                             {step * kStep, 0, 0, tile.tile * 8 + block / 2 * 4, 2 * tile.expert + block % 2},
                             stages.full());
                }
            }
            stages.advance();
        }
    }
}

// The rows of a tile in x.
struct ExpertsRows {
    const int32_t* offsets = nullptr;  // bytes
    int32_t rows = 0;
    const uint8_t* x = nullptr;
    int32_t bytes = 0;  // of a row
};

// Through the list, 16 bytes a copy.
template <typename Shape>
__device__ __forceinline__ void experts_copy_rows(const ExpertsMemory<Shape>& memory,
                                                  ExpertsRing<Shape::kStages>& stages,
                                                  const ExpertsRows& list) {
    const int lane_row = static_cast<int>(threadIdx.x % (32 * kExpertsRowWarps) / 8);
    const int piece = static_cast<int>(threadIdx.x % 8);
    const int rows = list.rows - lane_row;
    for (int k = 0; k < list.bytes; k += kSwizzleRowBytes) {
        const uint32_t to = memory.address + stages.stage * Shape::kStageBytes + Shape::kRowsOffset +
                            swizzle_128(lane_row, piece);
        barrier_wait(stages.empty(), stages.parity ^ 1);
        const int offset = k + piece * 16;
        const int bytes = offset < list.bytes ? 16 : 0;
        const uint8_t* from = list.x + (bytes != 0 ? offset : 0);
        const auto copy = [&](int row, int32_t at) {
            copy_async_16(to + row * kSwizzleRowBytes, from + at, bytes);
        };
        if constexpr (kOffsetsByFour<Shape>) {
            // Loads from shared memory wait behind the tensor cores' reads, and this loop may be what limits.
            const auto* offsets =
                reinterpret_cast<const int4*>(list.offsets + experts_offset_place<Shape>(lane_row));
#pragma unroll
            for (int row = 0; row < Shape::kTileMax; row += 4 * kCopyRows) {
                const int4 four = offsets[row / (4 * kCopyRows)];
                const int32_t at[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    if (row + i * kCopyRows < rows) {
                        copy(row + i * kCopyRows, at[i]);
                    }
                }
            }
        } else {
#pragma unroll 4
            for (int row = 0; row < rows; row += kCopyRows) {
                copy(row, list.offsets[lane_row + row]);
            }
        }
        barrier_arrive_copies(stages.full());
        stages.advance();
    }
}

// Two warps. x through the list of rows, unless it lies in their order; that and act in boxes.
template <bool Fp8, typename Shape>
__device__ __forceinline__ void experts_bring_rows(const ExpertsArgs& args,
                                                   const ExpertsMemory<Shape>& memory, int thread) {
    constexpr int kStep = kSwizzleRowBytes / (Fp8 ? 1 : 2);
    ExpertsRing<Shape::kStages> stages = memory.stages();
    ExpertsRing<Shape::kSlots> tiles = memory.tiles();
    int known = -1;  // the item whose rows of act are there
    for (;;) {
        const ExpertsTile tile = acquire_tile(memory, tiles);
        if (tile.phase < 0) {
            break;
        }
        const ExpertsSide& side = experts_side(args, tile);
        const int input_bytes = experts_input_bytes<Fp8>(args, tile);
        if (tile.phase == 0 && !args.x_sorted) {
            experts_copy_rows(memory, stages,
                              {memory.row_offsets(tiles.stage), tile.rows, side.x, input_bytes});
        } else {
            const int steps = (input_bytes + kSwizzleRowBytes - 1) / kSwizzleRowBytes;
            const int boxes = tile.columns / kRowBoxRows;
            const CUtensorMap* map = tile.phase == 0 ? &side.x_rows : &side.act;
            const int row = tile.phase == 0 && tile.shared != 0 ? tile.row - args.shared_row : tile.row;
            if (tile.phase == 1 && tile.item != known && thread < boxes) {
                const int tiles = (side.width + Shape::kOutputs - 1) / Shape::kOutputs;
                const int target = Shape::kReadyTiles * tiles;
                while (load_acquire(args.ready + tile.item) < target) {
                    __nanosleep(64);
                }
                fence_proxy_async_all();
                known = tile.item;
            }
            __syncwarp();
            for (int step = 0; step < steps; ++step) {
                const uint32_t to = memory.address + stages.stage * Shape::kStageBytes + Shape::kRowsOffset;
                barrier_wait(stages.empty(), stages.parity ^ 1);
                if (thread < boxes) {
                    barrier_arrive_expect(stages.full(), kRowBoxRows * kSwizzleRowBytes);
                    copy_box(to + thread * kRowBoxRows * kSwizzleRowBytes, map, step * kStep,
                             row + thread * kRowBoxRows, stages.full());
                } else {
                    barrier_arrive(stages.full());
                }
                stages.advance();
            }
        }
        release_tile(tiles);
        tiles.advance();
    }
    // The block must not end while copies are under way into its memory.
    copy_async_commit();
    copy_async_wait<0>();
}

}  // namespace tessera::cuda

// The producing warps of the experts' kernel: one takes tiles from the list, one brings the weights, two
// bring the tokens' rows.
#pragma once

#include <cuda_bf16.h>

#include "ops/common/cuda/dependent_launch.cuh"
#include "ops/moe/cuda/experts.cuh"
#include "ops/moe/cuda/own_plan.cuh"

namespace tessera::cuda {

__device__ __forceinline__ int load_acquire(const int32_t* from) {
    int value;
    asm volatile("ld.acquire.gpu.global.b32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
    return value;
}

// Whether a block makes the plan for itself.
template <typename Shape>
__device__ __forceinline__ bool has_own_plan(const ExpertsArgs& args) {
    return Shape::kOwnPlan && args.chosen != nullptr;
}
template <typename Shape>
__device__ __forceinline__ int2 experts_routed_items(const ExpertsArgs& args,
                                                     const ExpertsMemory<Shape>& memory) {
    if constexpr (Shape::kOwnPlan) {
        if (args.chosen != nullptr) {
            const int items = memory.own_plan()->routed_items;
            return make_int2(items, items);
        }
    }
    return *reinterpret_cast<const int2*>(args.routed_items);
}
template <typename Shape>
__device__ __forceinline__ int experts_row_token(const ExpertsArgs& args, const ExpertsMemory<Shape>& memory,
                                                 int row) {
    if constexpr (Shape::kOwnPlan) {
        if (args.chosen != nullptr) {
            return memory.own_plan()->tokens[row];
        }
    }
    return args.row_source[row];
}

// The item `index` of the shared ones and then the routed ones, as a tile without place.
template <typename Shape>
__device__ __forceinline__ ExpertsTile experts_item(const ExpertsArgs& args,
                                                    const ExpertsMemory<Shape>& memory, int index,
                                                    int phase) {
    ExpertsTile tile{.phase = phase, .item = index};
    if (index < args.shared_items) {
        const int first = index * args.shared_rows;
        tile.marks = kTileShared;
        tile.row = args.shared_row + first;
        tile.rows = min(args.shared_rows, args.tokens - first);
    } else if (has_own_plan<Shape>(args)) {
        if constexpr (Shape::kOwnPlan) {
            const OwnItem item = memory.own_plan()->items[index - args.shared_items];
            tile.expert = item.expert;
            tile.row = item.row;
            tile.rows = item.rows;
        }
    } else {
        const ExpertsItem* items = phase == 0 ? args.items : args.down_items;
        const int4 item = *reinterpret_cast<const int4*>(items + (index - args.shared_items));
        tile.expert = item.x;
        tile.row = item.y;
        tile.rows = item.z;
        tile.item = args.shared_items + item.w;
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

    // Of items for gate and up, and for down.
    __device__ __forceinline__ ExpertsList(const ExpertsArgs& args, int2 routed_items)
        : gate_tiles(Shape::kRowScales ? (args.routed.width + Shape::kOutputs - 1) / Shape::kOutputs
                                       : args.gate_tiles),
          shared_gate_tiles(args.shared_gate_tiles),
          down_tiles((args.hidden + Shape::kWeightRows - 1) / Shape::kWeightRows),
          shared_gates(args.shared_items * shared_gate_tiles),
          gates(shared_gates + routed_items.x * gate_tiles),
          downs((args.shared_items + routed_items.y) * down_tiles) {}

    // All gate and up tiles, then all down tiles, `run` at once; within each by item.
    __device__ __forceinline__ ExpertsTile tile(const ExpertsArgs& args, const ExpertsMemory<Shape>& memory,
                                                int index, int run) const {
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
        ExpertsTile tile = experts_item(args, memory, item, index >= gates ? 1 : 0);
        tile.tile = place;
        tile.columns = max((tile.rows + 15) / 16 * 16, Shape::kTileMin);
        return tile;
    }
};

// A block's first tile is its own number. What is known of it without the plan: all of the shared expert's,
// of an early item no rows; phase -1 if it is none of these.
template <typename Shape>
__device__ __forceinline__ ExpertsTile experts_early_tile(const ExpertsArgs& args,
                                                          const ExpertsMemory<Shape>& memory) {
    const ExpertsList<Shape> list(args, make_int2(args.early_items, 0));
    const int first = static_cast<int>(blockIdx.x);
    if (first < list.shared_gates) {
        return list.tile(args, memory, first, 1);
    }
    if (first >= list.gates) {
        return {};
    }
    const int item = (first - list.shared_gates) / list.gate_tiles;
    return {.phase = 0,
            .item = args.shared_items + item,
            .expert = item,
            .tile = (first - list.shared_gates) % list.gate_tiles};
}

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
template <bool Fp8>
__device__ __forceinline__ float experts_raw_scale(const ExpertsArgs& args, const ExpertsTile& tile,
                                                   int lane) {
    const ExpertsSide& side = experts_side(args, tile);
    if (!Fp8 || tile.phase < 0) {
        return 1;
    }
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

// With the tile go its scales, for which a consumer would wait between two tiles. raw: from
// experts_raw_scale().
template <bool Fp8, typename Shape>
__device__ __forceinline__ void experts_publish(const ExpertsArgs& args, const ExpertsMemory<Shape>& memory,
                                                ExpertsRing<Shape::kSlots>& tiles, const ExpertsTile& tile,
                                                float raw) {
    constexpr int kEach = Shape::kTileMax > 64 ? (Shape::kRowScales ? 2 : 3) : (Shape::kTileMax + 31) / 32;
    const int lane = static_cast<int>(threadIdx.x % 32);
    barrier_wait(tiles.empty(), tiles.parity ^ 1);
    if (lane == 0) {
        *memory.tile(tiles.stage) = tile;
    }
    const bool listed = tile.phase == 0 && (Shape::kRowScales || !args.x_sorted);
    for (int begin = lane; listed && begin < tile.rows; begin += 32 * kEach) {
        int token[kEach];
#pragma unroll
        for (int n = 0; n < kEach; ++n) {  // on their way at once
            const int i = begin + 32 * n;
            token[n] = i >= tile.rows  ? 0
                       : tile.shared() ? tile.row - args.shared_row + i
                                       : experts_row_token(args, memory, tile.row + i);
        }
#pragma unroll
        for (int n = 0; n < kEach; ++n) {
            const int i = begin + 32 * n;
            if (i < tile.rows) {
                memory.row_offsets(tiles.stage)[experts_offset_place<Shape>(i)] = token[n] * args.x_stride;
                if constexpr (Shape::kRowScales) {
                    memory.row_scales(tiles.stage)[i] = args.x_scale[token[n]];
                }
            }
        }
    }
    if constexpr (!Shape::kRowScales) {
        const float scale = Fp8 ? experts_scale(args, tile, lane, raw) : 1.0f;
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
// few stages each: of these some at once, and while further ones are left. scale: of experts_early_tile(), as
// from experts_raw_scale().
template <bool Fp8 = false, typename Shape>
__device__ __forceinline__ void experts_schedule(const ExpertsArgs& args, const ExpertsMemory<Shape>& memory,
                                                 const ExpertsLook& look, float scale = 1) {
    const int lane = static_cast<int>(threadIdx.x % 32);
    ExpertsRing<Shape::kSlots> tiles = memory.tiles();
    wait_for_previous_kernel();
    const int2 routed_items = experts_routed_items(args, memory);
    ExpertsTile tile = experts_early_tile<Shape>(args, memory);
    if (tile.phase == 0 && !tile.shared()) {  // its item does not wait for their number
        const int place = tile.tile;
        tile = experts_item(args, memory, tile.item, 0);
        tile.tile = place;
        tile.columns = max((tile.rows + 15) / 16 * 16, Shape::kTileMin);
    }
    const ExpertsList<Shape> list(args, routed_items);
    if (tile.phase < 0) {
        tile = list.tile(args, memory, static_cast<int>(blockIdx.x), look.run);
        scale = experts_raw_scale<Fp8>(args, tile, lane);
    }
    const int begin = has_own_plan<Shape>(args) ? kOwnCounter : 0;
    int left = 0;  // tiles that are published, the one under way among them
    for (;;) {
        experts_publish<Fp8>(args, memory, tiles, tile, scale);
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
        if (lane == 0) {
            next = atomicAdd(args.next_tile, 1);
        }
        next = __shfl_sync(0xFFFFFFFFu, next, 0) - begin + static_cast<int>(gridDim.x);
        tile = list.tile(args, memory, next, look.run);
        if constexpr (Shape::kRowScales) {
            // Its load and the item's wait together.
            if (tile.phase == 1) {
                tile.marks = load_acquire(args.ready + tile.item) != 0 ? kTileActHere : 0;
            }
        }
        scale = experts_raw_scale<Fp8>(args, tile, lane);
    }
}

struct ExpertsSteps {
    int begin = 0;
    int end = 0;
};
// One thread. The weights of some stages of a tile.
template <bool Fp8, typename Shape>
__device__ __forceinline__ void experts_bring_steps(const ExpertsArgs& args,
                                                    const ExpertsMemory<Shape>& memory,
                                                    ExpertsRing<Shape::kStages>& stages,
                                                    const ExpertsTile& tile, const ExpertsSteps& steps) {
    constexpr int kStep = kSwizzleRowBytes / (Fp8 ? 1 : 2);
    const ExpertsSide& side = experts_side(args, tile);
    const int first_row = tile.expert * args.hidden + tile.tile * Shape::kWeightRows;
    for (int step = steps.begin; step < steps.end; ++step) {
        const uint32_t to = memory.address + stages.stage * Shape::kStageBytes;
        barrier_wait(stages.empty(), stages.parity ^ 1);
        barrier_arrive_expect(stages.full(), Shape::kWeightBytes);
        if (tile.phase == 1 && Shape::kConsumers == 3) {
            copy_box(to, &side.down, step * kStep, first_row, stages.full());
        } else if (tile.phase == 1 && Shape::kBlocks == 2 && args.down_pairs) {
#pragma unroll
            for (int half = 0; half < Shape::kBlocks; ++half) {
                copy_box(to + half * 2 * Shape::kBlockBytes, &side.down,
                         {step * kStep, 0, 0, 0, first_row / 128 + half}, stages.full());
            }
        } else if (tile.phase == 1) {
#pragma unroll
            for (int half = 0; half < Shape::kBlocks; ++half) {
                copy_box(to + half * 2 * Shape::kBlockBytes, &side.down, step * kStep, first_row + 128 * half,
                         stages.full());
            }
        } else if constexpr (Shape::kBlocks == 1) {
            copy_box(to, &side.gate_up, {step * kStep, 0, 0, tile.tile * (Shape::kOutputs / 8), tile.expert},
                     stages.full());
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

// Stages of a tile.
template <bool Fp8>
__device__ __forceinline__ int experts_steps(const ExpertsArgs& args, const ExpertsTile& tile) {
    return (experts_input_bytes<Fp8>(args, tile) + kSwizzleRowBytes - 1) / kSwizzleRowBytes;
}

// How many stages of a first tile are brought early.
template <bool Fp8>
__device__ __forceinline__ int experts_early_steps(const ExpertsArgs& args, const ExpertsTile& tile) {
    return tile.phase < 0 ? 0 : min(experts_steps<Fp8>(args, tile), kEarlySteps);
}

// One thread. `early`: the stages of the first tile that are brought already.
template <bool Fp8, typename Shape>
__device__ __forceinline__ void experts_bring_weights(const ExpertsArgs& args,
                                                      const ExpertsMemory<Shape>& memory,
                                                      const ExpertsLook& look, int early) {
    ExpertsRing<Shape::kStages> stages = memory.stages();
    ExpertsRing<Shape::kSlots> tiles = memory.tiles();
    stages.advance(early);
    bool here = has_own_plan<Shape>(args) && early == 0;  // the first tile is known before it is told
    for (;; here = false) {
        const ExpertsTile tile = here ? ExpertsList<Shape>(args, experts_routed_items(args, memory))
                                            .tile(args, memory, static_cast<int>(blockIdx.x), look.run)
                                      : acquire_tile(memory, tiles);
        barrier_arrive(tiles.empty());
        tiles.advance();
        if (tile.phase < 0) {
            return;
        }
        experts_bring_steps<Fp8>(args, memory, stages, tile,
                                 {.begin = early, .end = experts_steps<Fp8>(args, tile)});
        early = 0;
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
    const int begin = has_own_plan<Shape>(args) ? kOwnCounter : 0;  // of counters
    int known = -1;                                                 // the item whose rows of act are there
    for (;;) {
        const ExpertsTile tile = acquire_tile(memory, tiles);
        if (tile.phase < 0) {
            break;
        }
        wait_for_previous_kernel();  // at the first tile: the shared expert's comes before that
        const ExpertsSide& side = experts_side(args, tile);
        const int input_bytes = experts_input_bytes<Fp8>(args, tile);
        if (tile.phase == 0 && !args.x_sorted) {
            experts_copy_rows(memory, stages,
                              {memory.row_offsets(tiles.stage), tile.rows, side.x, input_bytes});
        } else {
            const int steps = (input_bytes + kSwizzleRowBytes - 1) / kSwizzleRowBytes;
            const int boxes = tile.columns / kRowBoxRows;
            const CUtensorMap* map = tile.phase == 0 ? &side.x_rows : &side.act;
            const int row = tile.phase == 0 && tile.shared() ? tile.row - args.shared_row : tile.row;
            if (tile.phase == 1 && tile.item != known && thread < boxes) {
                const int tiles = (side.width + Shape::kOutputs - 1) / Shape::kOutputs;
                const int target = Shape::kReadyTiles * tiles;
                while (load_acquire(args.ready + tile.item) - begin < target) {
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
    if (has_own_plan<Shape>(args) && thread < 32) {
        own_plan_leave(args);
    }
    // The block must not end while copies are under way into its memory.
    copy_async_commit();
    copy_async_wait<0>();
}

}  // namespace tessera::cuda

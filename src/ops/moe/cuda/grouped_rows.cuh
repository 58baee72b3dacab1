// The warps of the grouped experts' kernel that bring the tokens' rows.
#pragma once

#include "ops/moe/cuda/experts_grouped.h"
#include "ops/moe/cuda/experts_produce.cuh"

namespace tessera::cuda {

// The scales of rows of act come in pieces of four; so many of them lie before a tile's.
__device__ __forceinline__ int grouped_scales_begin(int row) {
    return row % 4;
}

// Whether the phase with this parity is complete.
__device__ __forceinline__ bool barrier_test(uint32_t barrier, uint32_t parity) {
    uint32_t done;
    asm volatile(
        "{\n.reg .pred p;\n"
        "mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;\n"
        "selp.u32 %0, 1, 0, p;\n}\n"
        : "=r"(done)
        : "r"(barrier), "r"(parity)
        : "memory");
    return done != 0;
}

// Stages that a warp's copies fill, fenced for the tensor cores by the warp: a stage is told of some stages
// later, or when the next one is not free yet. Faster with few rows than a fence by those that wait.
template <int Stages, int UnderWay = 3>
class FencedStages {
  public:
    __device__ __forceinline__ explicit FencedStages(ExpertsRing<Stages>& ring)
        : ring_(ring), oldest_(ring) {}

    // Until the next stage is free.
    __device__ __forceinline__ void acquire() {
        if (!__all_sync(0xFFFFFFFFu, barrier_test(ring_.empty(), ring_.parity ^ 1))) {
            tell_all();
            barrier_wait(ring_.empty(), ring_.parity ^ 1);
        }
    }
    // The copies into it are issued.
    __device__ __forceinline__ void commit() {
        copy_async_commit();
        ring_.advance();
        if (++count_ > UnderWay) {
            copy_async_wait<UnderWay>();
            tell();
        }
    }
    __device__ __forceinline__ void tell_all() {
        copy_async_wait<0>();
        while (count_ > 0) {
            tell();
        }
    }

  private:
    __device__ __forceinline__ void tell() {
        fence_proxy_async();
        barrier_arrive(oldest_.full());
        oldest_.advance();
        --count_;
    }

    ExpertsRing<Stages>& ring_;
    ExpertsRing<Stages> oldest_;
    int count_ = 0;
};

// x through the list, as experts_copy_rows(), but fenced here.
template <typename Shape>
__device__ __forceinline__ void grouped_copy_fenced(const ExpertsMemory<Shape>& memory,
                                                    ExpertsRing<Shape::kStages>& stages,
                                                    const ExpertsRows& list) {
    const int lane_row = static_cast<int>(threadIdx.x % (32 * kExpertsRowWarps) / 8);
    const int piece = static_cast<int>(threadIdx.x % 8);
    FencedStages<Shape::kStages> fenced(stages);
    for (int k = piece * 16; k < list.bytes; k += kSwizzleRowBytes) {
        fenced.acquire();
        const uint32_t to = memory.address + stages.stage * Shape::kStageBytes + Shape::kRowsOffset +
                            swizzle_128(lane_row, piece);
#pragma unroll 2
        for (int row = 0; row < list.rows - lane_row; row += kCopyRows) {
            copy_async_16(to + row * kSwizzleRowBytes,
                          list.x + list.offsets[experts_offset_place<Shape>(lane_row + row)] + k);
        }
        fenced.commit();
    }
    fenced.tell_all();
}

// In boxes: act, and with its first stage the rows' scales into the tiles' list; or x, in the order of the
// rows.
template <typename Shape>
__device__ __forceinline__ void grouped_copy_boxes(const ExpertsGroupedArgs& args,
                                                   const ExpertsMemory<Shape>& memory,
                                                   ExpertsRing<Shape::kStages>& stages,
                                                   const ExpertsTile& tile, uint32_t scales) {
    const ExpertsSide& side = args.experts.routed;
    const int thread = static_cast<int>(threadIdx.x % (32 * kExpertsRowWarps));
    const int inputs = tile.phase == 0 ? args.experts.hidden : side.width;
    const int boxes = tile.columns / kRowBoxRows;
    const CUtensorMap* map = tile.phase == 0 ? &side.x_rows : &side.act;
    for (int input = 0; input < inputs; input += kSwizzleRowBytes) {
        const uint32_t to = memory.address + stages.stage * Shape::kStageBytes + Shape::kRowsOffset;
        barrier_wait(stages.empty(), stages.parity ^ 1);
        if (thread < boxes) {
            barrier_arrive_expect(stages.full(), kRowBoxRows * kSwizzleRowBytes);
            copy_box(to + thread * kRowBoxRows * kSwizzleRowBytes, map, input,
                     tile.row + thread * kRowBoxRows, stages.full());
        } else if (thread == boxes && tile.phase == 1 && input == 0) {
            const int begin = grouped_scales_begin(tile.row);
            const auto bytes = static_cast<uint32_t>((begin + tile.rows + 3) / 4 * 16);
            barrier_arrive_expect(stages.full(), bytes);
            copy_bulk(scales, args.act_scale + (tile.row - begin), bytes, stages.full());
        } else {
            barrier_arrive(stages.full());
        }
        stages.advance();
    }
}

// Two warps, as experts_bring_rows(). Also the scales of the rows.
template <typename Shape>
__device__ __forceinline__ void grouped_bring_rows(const ExpertsGroupedArgs& args,
                                                   const ExpertsMemory<Shape>& memory) {
    const ExpertsArgs& experts = args.experts;
    ExpertsRing<Shape::kStages> stages = memory.stages();
    ExpertsRing<Shape::kSlots> tiles = memory.tiles();
    int known = -1;  // the item whose rows of act are there
    for (;;) {
        const ExpertsTile tile = acquire_tile(memory, tiles);
        if (tile.phase < 0) {
            break;
        }
        if (tile.phase == 0 && !experts.x_sorted) {
            const ExpertsRows list{memory.row_offsets(tiles.stage), tile.rows, experts.routed.x,
                                   experts.hidden};
            if constexpr (Shape::kFencedRows) {
                grouped_copy_fenced(memory, stages, list);
            } else {
                experts_copy_rows(memory, stages, list);
            }
        } else {
            if (tile.phase == 1 && tile.item != known) {
                while ((tile.marks & kTileActHere) == 0 && load_acquire(experts.ready + tile.item) == 0) {
                    __nanosleep(64);
                }
                fence_proxy_async_all();
                known = tile.item;
            }
            __syncwarp();
            grouped_copy_boxes(args, memory, stages, tile, shared_address(memory.row_scales(tiles.stage)));
        }
        release_tile(tiles);
        tiles.advance();
    }
    // The block must not end while copies are under way into its memory.
    copy_async_commit();
    copy_async_wait<0>();
}

}  // namespace tessera::cuda

// What the kernels of decode attention share: the workspace, the arguments, and the walk over a bin's pieces.
#pragma once

#include <cstdint>

#include "ops/attention/cuda/attention_cuda.h"
#include "ops/common/cuda/convert.cuh"
#include "ops/common/cuda/dependent_launch.cuh"
#include "ops/common/cuda/reduce.cuh"

namespace tessera::cuda {

inline constexpr int kHeadDim = 128;
inline constexpr int kDecodeRowsMax = 32;  // queries times heads of one work item

// KV heads with more than 32 rows (queries times heads of the group) count as several heads, each with a part
// of the rows.
struct DecodeRows {
    int32_t group = 1;
    int32_t all = 1;  // of a KV head: row r is query r / group, head r % group of the group
    int32_t parts = 1;
    int32_t each = 1;    // all / parts
    int32_t heads = 1;   // kv_heads * parts: head h is part h % parts of KV head h / parts
    int32_t padded = 8;  // `each` as the kernel has it: 8, 16 or 32
};

inline constexpr int kDecodeBlocksOfSm = 2;
// Fewer blocks than the device holds: where decode kernels follow each other, the places of those that end
// last, which merge, are then not the next kernel's last ones to begin.
inline constexpr int kDecodeSpareBlocks = 8;

// A partial result: [padded rows][4 slices][8 places] times four sums of O, not divided, and [padded rows][4
// slices] times base of the exponents (log2) and sum of the row: each slice with a state of its own.
inline constexpr int kPartialFloatsOfRow = kHeadDim + 2 * kDecodeSlices;
inline constexpr uint32_t kUnwritten =
    0xFFFFFFFF;  // a word that nobody has written yet: the largest, and no result has these bits

// What lies in the workspace: the plan, and the partial results.
struct DecodeLayout {
    DecodeBin* bins = nullptr;  // [bin_count + 1], the same for every head
    int32_t bin_count = 0;
    float* partials = nullptr;  // [decode_slots_of_plan()][padded * kPartialFloatsOfRow]
    int64_t partial_bytes = 0;
    int64_t bytes = 0;
};

struct DecodeKernelArgs {
    DecodeCudaArgs decode;
    DecodeLayout layout;
    DecodeRows rows;
    Divider out8_divide{};
};

DecodeRows make_decode_rows(const DecodePlanCudaArgs& plan);
DecodeLayout make_decode_layout(const DecodePlanCudaArgs& plan);

// 16 bytes at once.
__device__ __forceinline__ DecodeBin load_bin(const DecodeBin* from) {
    const int4 raw = *reinterpret_cast<const int4*>(from);
    return {raw.x, raw.y, raw.z, raw.w};
}
__device__ __forceinline__ void store_bin(DecodeBin* to, const DecodeBin& bin) {
    *reinterpret_cast<int4*>(to) = make_int4(bin.sequence, bin.tile, bin.pieces, bin.piece);
}

struct DecodeWork {
    DecodePiece piece;
    DecodePieces all;   // of the sequence, for this head
    int32_t slots = 0;  // of the sequence; 0 = an empty row
};

// Walks a block's pieces. Every lane of a warp calls next(), and gets the same answer.
class DecodeWalk {
  public:
    __device__ __forceinline__ explicit DecodeWalk(const DecodeKernelArgs& args)
        : plan_(args.decode.plan),
          block_(load_block(args)),
          end_(load_bin(args.layout.bins + block_.bin + 1)),
          place_(block_.from) {
        load_slots();
    }
    __device__ __forceinline__ bool next(DecodeWork& work) {
        if (!decode_before(place_, end_)) {
            return false;
        }
        if (place_.sequence - first_ >= kWarp) {
            load_slots();
        }
        work.slots = __shfl_sync(kFullWarp, lane_slots_, place_.sequence - first_);
        const int32_t tiles = decode_tiles(work.slots);
        work.piece = decode_next_piece(tiles, end_, place_);
        work.all = decode_pieces_of(block_, tiles, work.piece);
        return true;
    }

  private:
    __device__ static __forceinline__ DecodeBlock load_block(const DecodeKernelArgs& args) {
        const int bin = static_cast<int>(blockIdx.x) / args.rows.heads;
        return {bin, static_cast<int>(blockIdx.x) % args.rows.heads, args.rows.heads,
                load_bin(args.layout.bins + max(bin - 1, 0)), load_bin(args.layout.bins + bin)};
    }
    // Of the next 32 sequences, one a lane.
    __device__ __forceinline__ void load_slots() {
        first_ = place_.sequence;
        const int sequence = first_ + static_cast<int>(threadIdx.x) % kWarp;
        const int position = sequence < plan_.batch ? plan_.positions[sequence] : -1;
        lane_slots_ = decode_slots(position, plan_.q_len, plan_.first_slot, plan_.slots_max);
    }

    const DecodePlanCudaArgs& plan_;
    const DecodeBlock block_;
    const DecodeBin end_;
    DecodeBin place_;
    int32_t first_ = 0;
    int32_t lane_slots_ = 0;
};

}  // namespace tessera::cuda

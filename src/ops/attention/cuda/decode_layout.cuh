// What the kernels of decode attention share: the workspace, the arguments, and the walk over a bin's pieces.
#pragma once

#include <cstdint>

#include "ops/attention/cuda/attention_cuda.h"
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
    int32_t each = 1;   // all / parts
    int32_t heads = 1;  // kv_heads * parts: head h is part h % parts of KV head h / parts
};

// The plan's place in the workspace, and the partial results'.
struct DecodeLayout {
    DecodeBin* bins = nullptr;  // [bin_count + 1]
    int32_t bin_count = 0;
    float* sums = nullptr;     // [slots, each, 128], not divided
    float2* states = nullptr;  // [slots, each]: base of the exponents (log2), sum
    int64_t bytes = 0;
};

struct DecodeKernelArgs {
    DecodeCudaArgs decode;
    DecodeLayout layout;
    DecodeRows rows;
};

DecodeRows make_decode_rows(const DecodePlanCudaArgs& plan);
DecodeLayout make_decode_layout(const DecodePlanCudaArgs& plan);

// 16 bytes at once.
__device__ __forceinline__ DecodeBin load_bin(const DecodeBin* from) {
    const int4 raw = *reinterpret_cast<const int4*>(from);
    return {raw.x, raw.y, raw.z, static_cast<int16_t>(raw.w), static_cast<int16_t>(raw.w >> 16)};
}
__device__ __forceinline__ void store_bin(DecodeBin* to, const DecodeBin& bin) {
    *reinterpret_cast<int4*>(to) =
        make_int4(bin.sequence, bin.head, bin.tile, bin.piece << 16 | static_cast<uint16_t>(bin.pieces));
}

struct DecodeWork {
    DecodePiece piece;
    int32_t slots = 0;  // of the sequence; 0 = an empty row
};

// Walks a bin's pieces. Every lane of a warp calls next(), and gets the same answer.
class DecodeWalk {
  public:
    __device__ __forceinline__ DecodeWalk(const DecodeKernelArgs& args, int bin)
        : plan_(args.decode.plan), heads_(args.rows.heads), bin_(bin) {
        place_ = load_bin(args.layout.bins + bin);
        end_ = load_bin(args.layout.bins + bin + 1);
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
        work.piece = decode_next_piece(plan_.split, heads_, tiles, end_, place_);
        work.piece.slot = decode_slot(plan_.split, heads_, bin_, tiles, work.piece);
        return true;
    }

  private:
    // Of the next 32 sequences, one a lane.
    __device__ __forceinline__ void load_slots() {
        first_ = place_.sequence;
        const int sequence = first_ + static_cast<int>(threadIdx.x) % kWarp;
        const int position = sequence < plan_.batch ? plan_.positions[sequence] : -1;
        lane_slots_ = decode_slots(position, plan_.q_len, plan_.first_slot, plan_.slots_max);
    }

    const DecodePlanCudaArgs& plan_;
    int32_t heads_;
    int32_t bin_;
    DecodeBin place_, end_;
    int32_t first_ = 0;
    int32_t lane_slots_ = 0;
};

void launch_decode_combine(cudaStream_t stream, const DecodeKernelArgs& args);

}  // namespace tessera::cuda

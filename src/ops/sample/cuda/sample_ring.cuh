// Which tiles of which rows a block reads, and the copies that bring them.
#pragma once

#include "ops/common/cuda/async_copy.cuh"
#include "ops/sample/cuda/sample_tile.cuh"

namespace tessera::cuda {

inline constexpr int kReadWarps = 20;
inline constexpr int kSampleRing = 2;  // tiles that a warp holds

// The tiles of all rows in their order, evenly over the blocks; a warp takes every kReadWarps-th.
struct TileSpan {
    int32_t begin = 0;
    int32_t end = 0;
    int32_t of_row = 0;  // tiles

    __device__ explicit TileSpan(const SampleCudaArgs& args)
        : of_row(static_cast<int32_t>((args.vocab + kSampleTile - 1) / kSampleTile)) {
        const int64_t all = args.rows * of_row;
        begin = static_cast<int32_t>(blockIdx.x * all / gridDim.x);
        end = static_cast<int32_t>((blockIdx.x + 1) * all / gridDim.x);
    }
    __device__ int32_t first_row() const { return begin / of_row; }
};

// The tiles that a warp reads, in its ring of shared memory.
class TileRing {
  public:
    __device__ TileRing(const SampleCudaArgs& args, const TileSpan& span, float* memory, uint64_t* barriers)
        : args_(args), span_(span), memory_(memory), barriers_(shared_address(barriers)) {
        lane_ = static_cast<int>(threadIdx.x) % kWarp;
        // The copy engine brings all tiles, all are whole, and they follow each other.
        plain_ = args.vocab % kSampleTile == 0 && args.logits_stride == args.vocab &&
                 reinterpret_cast<uintptr_t>(args.logits) % 16 == 0;
        if (lane_ < kSampleRing) {
            barrier_init(barriers_ + 8 * static_cast<uint32_t>(lane_), 1);
        }
        barrier_init_fence();
        __syncwarp();
    }

    __device__ int32_t tile(int i) const {
        return span_.begin + static_cast<int32_t>(threadIdx.x) / kWarp + i * kReadWarps;
    }
    __device__ float* memory(int i) const { return memory_ + i % kSampleRing * kSampleTile; }

    // Begins to bring the warp's i-th tile, if there is one.
    __device__ void begin(int i) const {
        if (lane_ != 0 || tile(i) >= span_.end) {
            return;
        }
        const Source from = source(i);
        barrier_arrive_expect(barrier(i), from.bulk ? static_cast<uint32_t>(from.count * 4) : 0);
        if (from.bulk) {
            copy_bulk_once(shared_address(memory(i)), from.logits, static_cast<uint32_t>(from.count * 4),
                           barrier(i));
        }
    }
    // The same where memory that was written is used again. By the whole warp.
    __device__ void begin_again(int i) const {
        if (tile(i) < span_.end) {
            fence_proxy_async();
            __syncwarp();
            begin(i);
        }
    }
    // The i-th tile, padded with -inf. By the whole warp.
    __device__ void wait(int i) const {
        barrier_wait(barrier(i), static_cast<uint32_t>(i / kSampleRing % 2));
        if (plain_) {
            return;
        }
        const Source from = source(i);
        if (from.bulk && from.count == kSampleTile) {
            return;
        }
        for (int32_t k = lane_ + (from.bulk ? from.count : 0); k < kSampleTile; k += kWarp) {
            memory(i)[k] = k < from.count ? from.logits[k] : minus_infinity();
        }
        __syncwarp();
    }

  private:
    struct Source {
        const float* logits = nullptr;
        int32_t count = 0;
        bool bulk = false;  // the copy engine can bring it
    };
    __device__ Source source(int i) const {
        if (plain_) {
            return {args_.logits + static_cast<int64_t>(tile(i)) * kSampleTile, kSampleTile, true};
        }
        const int32_t row = tile(i) / span_.of_row;
        const int32_t first = tile(i) % span_.of_row * kSampleTile;
        Source from{args_.logits + row * args_.logits_stride + first,
                    min(kSampleTile, static_cast<int32_t>(args_.vocab) - first)};
        from.bulk = from.count % 4 == 0 && reinterpret_cast<uintptr_t>(from.logits) % 16 == 0;
        return from;
    }
    __device__ uint32_t barrier(int i) const {
        return barriers_ + 8 * static_cast<uint32_t>(i % kSampleRing);
    }

    const SampleCudaArgs& args_;
    const TileSpan& span_;
    float* memory_;  // [kSampleRing][kSampleTile]
    uint32_t barriers_;
    int lane_ = 0;
    bool plain_ = false;
};

}  // namespace tessera::cuda

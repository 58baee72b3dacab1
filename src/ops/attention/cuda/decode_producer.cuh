// The copying side of decode attention: the ring in shared memory, and the warp that fills it.
#pragma once

#include <algorithm>
#include <cstdint>

#include <cuda.h>

#include "ops/attention/cuda/decode_sums.cuh"
#include "ops/common/cuda/async_copy.cuh"
#include "ops/common/cuda/wgmma.cuh"

namespace tessera::cuda {

inline constexpr int kQueryBytes = kHeadDim * 2;
// Halves of stages that a block whose first piece has fewer than kShortPiece tiles has under way at most
// before the kernel before this one has ended: a tile. More would fill the memory's queues, in which that
// kernel's merge then waits for microseconds: less than a long piece gains by filling its ring at once.
inline constexpr int kEarlyHalves = 2;
inline constexpr int kShortPiece = 12;
// Tiles that come after the ring's and are brought into the level-2 cache meanwhile.
inline constexpr int kEarlyTiles = 2;

// Shared memory. Half a stage of the ring is K or V of one tile. All offsets are multiples of 1024 up to
// `raw`.
// Scaled: each tile of K has its slots' scales beside it.
template <bool Fp8, int Rows, bool Scaled>
struct Shared {
    static constexpr int kTerms = Fp8 ? 2 : 1;
    static constexpr int kColumns = Rows * kTerms;
    static constexpr int kHalfBytes = kDecodeTileSlots * kHeadDim * (Fp8 ? 1 : 2);
    static constexpr int kOperandBytes = Rows * kQueryBytes;          // fp8: two terms
    static constexpr int kWeightBytes = kColumns * kSwizzleRowBytes;  // P^T
    static constexpr int kFixedBytes =
        3 * kOperandBytes + kWeightBytes + Rows * 4 * (2 * kMathWarps + 1) + 32;

    // Of a multiprocessor's 228 KiB, of which each block takes 1 KiB beside what it asks for.
    static constexpr int kAvailable = 228 * 1024 / kDecodeBlocksOfSm - 1024;
    static constexpr int kScaleBytes = Scaled ? kDecodeTileSlots * 4 : 0;
    static constexpr int kStageBytes = kHalfBytes + kScaleBytes + 16;
    static constexpr int kStages = (kAvailable - kFixedBytes) / kStageBytes;
    static constexpr int kBytes = kFixedBytes + kStages * kStageBytes;

    uint32_t begin;

    __device__ uint32_t half(int stage) const { return begin + static_cast<uint32_t>(stage * kHalfBytes); }
    __device__ uint32_t operand() const { return half(kStages); }
    __device__ uint32_t weights() const { return operand() + kOperandBytes; }
    __device__ uint32_t raw(int i) const {
        return weights() + kWeightBytes + static_cast<uint32_t>(i) * kOperandBytes;
    }
    __device__ uint32_t floats() const { return raw(2); }
    __device__ uint32_t scales(int stage) const {
        return floats() + Rows * 4 * (2 * kMathWarps + 1) + static_cast<uint32_t>(stage * kScaleBytes);
    }
    __device__ uint32_t full(int stage) const { return scales(kStages) + static_cast<uint32_t>(stage) * 16; }
    __device__ uint32_t empty(int stage) const { return full(stage) + 8; }
    __device__ uint32_t query_full(int i) const { return full(kStages) + static_cast<uint32_t>(i) * 16; }
    __device__ uint32_t query_empty(int i) const { return query_full(i) + 8; }
};

// A place in the ring.
struct Cursor {
    int stage = 0;
    uint32_t parity = 0;
    template <int Stages>
    __device__ __forceinline__ void advance() {
        stage += 1;
        if (stage == Stages) {
            stage = 0;
            parity ^= 1;
        }
    }
};

// K or V of one head in one page; read once, so first to leave the L2 cache.
__device__ __forceinline__ void copy_page(uint32_t to, const CUtensorMap* map, int head, int page,
                                          uint32_t barrier) {
    constexpr uint64_t kEvictFirst = 0x12F0000000000000;
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint"
        " [%0], [%1, {%2, %2, %2, %3, %4}], [%5], %6;" ::"r"(to),
        "l"(map), "r"(0), "r"(head), "r"(page), "r"(barrier), "l"(kEvictFirst)
        : "memory");
}

// The same into the level-2 cache.
__device__ __forceinline__ void fetch_page(const CUtensorMap* map, int head, int page) {
    asm volatile("cp.async.bulk.prefetch.tensor.5d.L2.global.tile [%0, {%1, %1, %1, %2, %3}];" ::"l"(map),
                 "r"(0), "r"(head), "r"(page)
                 : "memory");
}
// A block's rows of q for a sequence to place `at`. Every lane of a warp calls it.
template <bool Fp8, int Rows, bool Scaled>
__device__ __forceinline__ void copy_queries(const DecodeKernelArgs& args,
                                             const Shared<Fp8, Rows, Scaled>& shared, int32_t sequence,
                                             int at) {
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
    const int head = static_cast<int>(blockIdx.x) % args.rows.heads;
    const int rows = args.rows.each;
    if (lane == 0) {
        barrier_arrive_expect(shared.query_full(at), static_cast<uint32_t>(rows * kQueryBytes));
    }
    __syncwarp();
    if (lane < rows) {
        const int row = head % args.rows.parts * rows + lane;
        const int64_t token = int64_t{sequence} * args.decode.plan.q_len + row / args.rows.group;
        const int q_head = head / args.rows.parts * args.rows.group + row % args.rows.group;
        copy_bulk(shared.raw(at) + static_cast<uint32_t>(lane * kQueryBytes),
                  static_cast<const std::byte*>(args.decode.q) +
                      (token * args.decode.q_stride + q_head * kHeadDim) * 2,
                  kQueryBytes, shared.query_full(at));
    }
}

// The copying warp.
template <bool Fp8, int Rows, bool Scaled>
class Producer {
    using S = Shared<Fp8, Rows, Scaled>;

  public:
    __device__ Producer(const DecodeKernelArgs& args, const CUtensorMap* k, const CUtensorMap* v,
                        const S& shared)
        : args_(args), k_(k), v_(v), shared_(shared), lane_(static_cast<int>(threadIdx.x) % kWarp) {}

    __device__ __forceinline__ void run() {
        if (!args_.decode.settled) {
            wait_for_previous_kernel();
            ready_ = true;
        }
        DecodeWalk walk(args_);
        DecodeWork work;
        bool more = walk.next(work);
        int32_t pages = more ? load_pages(work, work.piece.begin) : 0;
        while (more) {
            DecodeWork coming;
            const bool more_comes = walk.next(coming);
            const int32_t coming_pages = more_comes ? load_pages(coming, coming.piece.begin) : 0;
            if (work.slots > 0) {
                send_queries(work);
                send_tiles(work, pages);
            }
            work = coming;
            pages = coming_pages;
            more = more_comes;
        }
    }

  private:
    __device__ __forceinline__ int head() const { return static_cast<int>(blockIdx.x) % args_.rows.heads; }
    __device__ __forceinline__ int kv_head() const { return head() / args_.rows.parts; }
    // Of the tiles from `tile` on, one a lane.
    __device__ __forceinline__ int32_t load_pages(const DecodeWork& work, int tile) const {
        const PagedKvCuda& kv = args_.decode.kv;
        const int32_t* table = kv.page_tables + static_cast<int64_t>(work.piece.sequence) * kv.pages_max;
        return tile + lane_ < work.piece.end ? table[tile + lane_] : 0;
    }
    // Those of the first piece are the consumer's to bring where the previous kernel may still write them.
    __device__ __forceinline__ void send_queries(const DecodeWork& work) {
        if (ready_) {
            barrier_wait(shared_.query_empty(queries_ & 1), (queries_ >> 1 & 1) ^ 1);
            copy_queries(args_, shared_, work.piece.sequence, queries_ & 1);
        }
        queries_ += 1;
    }
    __device__ __forceinline__ void send_tiles(const DecodeWork& work, int32_t pages) {
        const int head = kv_head();
        // Slots that earlier steps wrote may be read before the previous kernel has ended, as far as the ring
        // reaches.
        const int written = (work.slots - args_.decode.plan.q_len) / kDecodeTileSlots;
        const int early = min(min(written, work.piece.end), work.piece.begin + S::kStages / 2);
        sparing_ = work.piece.end - work.piece.begin < kShortPiece;
        for (int tile = work.piece.begin; tile < work.piece.end; ++tile) {
            const int i = (tile - work.piece.begin) % kWarp;
            if (!ready_ && tile >= early) {
                fetch_tiles(tile, min(written, work.piece.end), __shfl_sync(kFullWarp, pages, i + lane_ / 2));
                become_ready();
            }
            if (i == 0 && tile > work.piece.begin) {
                pages = load_pages(work, tile);
            }
            const int32_t page = __shfl_sync(kFullWarp, pages, i);
            send<S::kScaleBytes>(k_, head, page);
            send<0>(v_, head, page);
        }
        if (!ready_) {
            become_ready();
        }
    }
    __device__ __forceinline__ void become_ready() {
        wait_for_previous_kernel();
        ready_ = true;
    }
    // The first tiles from `tile` on, below `end`; page: of tile + lane / 2.
    __device__ __forceinline__ void fetch_tiles(int tile, int end, int32_t page) const {
        if (lane_ < 2 * kEarlyTiles && tile + lane_ / 2 < end) {
            fetch_page(lane_ % 2 == 0 ? k_ : v_, kv_head(), page);
        }
        __syncwarp();
    }
    template <int ScaleBytes>
    __device__ __forceinline__ void send(const CUtensorMap* map, int head, int page) {
        const int stage = cursor_.stage;
        barrier_wait(shared_.empty(stage), cursor_.parity ^ 1);
        if (!ready_ && sparing_ && stage >= kEarlyHalves) {
            barrier_wait(shared_.full(stage - kEarlyHalves), 0);
        }
        if (lane_ == 0) {
            barrier_arrive_expect(shared_.full(stage), S::kHalfBytes + ScaleBytes);
            copy_page(shared_.half(stage), map, head, page, shared_.full(stage));
            if constexpr (ScaleBytes > 0) {
                const PagedKvCuda& kv = args_.decode.kv;
                copy_bulk(shared_.scales(stage),
                          kv.pool + page * kv.page_stride + kv.k_scales_offset + head * ScaleBytes,
                          ScaleBytes, shared_.full(stage));
            }
        }
        __syncwarp();
        cursor_.template advance<S::kStages>();
    }

    const DecodeKernelArgs& args_;
    const CUtensorMap* k_;
    const CUtensorMap* v_;
    const S shared_;
    const int lane_;
    Cursor cursor_;
    uint32_t queries_ = 0;
    bool ready_ = false;    // the previous kernel has ended
    bool sparing_ = false;  // has few copies under way until then
};

}  // namespace tessera::cuda

// Roofline: 4 bytes a logit at 4.27 TB/s: 0.11 us a row of 120,832. Every logit is read once from memory, and
// nothing waits for another block before all of a block's logits are read: a tile of 1,024 ids is weighed by
// its own best token. The block that has a row's last tile then finishes the row from the tiles' words; what
// it needs of the logits themselves comes from the level-2 cache. See README.md.
#include <algorithm>
#include <string>

#include "base/check.h"
#include "device/cuda/cuda_check.h"
#include "ops/common/cuda/async_copy.cuh"
#include "ops/common/cuda/dependent_launch.cuh"
#include "ops/sample/cuda/sample_few.h"
#include "ops/sample/cuda/sample_report.cuh"

namespace tessera {
namespace {

using namespace cuda;

// A warp has its ring, and memory for one more tile.
constexpr int kRingBytes = kSampleWarps * (kSampleRing + 1) * kSampleTile * 4;
constexpr int kSharedBytes = kRingBytes + static_cast<int>(sizeof(SampleShared));

constexpr int kToldMax = kSampleTile / 4;  // in a warp's memory

int64_t tiles_of(int64_t vocab) {
    return (vocab + kSampleTile - 1) / kSampleTile;
}

// The tiles of all rows in their order, evenly over the blocks; a warp takes every kSampleWarps-th.
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
        plain_ = args.vocab % kSampleTile == 0 && args.logits_stride % 4 == 0 &&
                 reinterpret_cast<uintptr_t>(args.logits) % 16 == 0;
        if (lane_ < kSampleRing) {
            barrier_init(barriers_ + 8 * static_cast<uint32_t>(lane_), 1);
        }
        barrier_init_fence();
        __syncwarp();
    }

    __device__ int32_t tile(int i) const {
        return span_.begin + static_cast<int32_t>(threadIdx.x) / kWarp + i * kSampleWarps;
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
            copy_bulk(shared_address(memory(i)), from.logits, static_cast<uint32_t>(from.count * 4),
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
    // The i-th tile, padded with -inf.
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
    bool plain_ = false;  // the copy engine brings all tiles, and all are whole
};

// The slots of the block's rows, for the whole block. A barrier follows.
__device__ void load_slots(const SampleCudaArgs& args, SampleShared& shared, const TileSpan& span) {
    constexpr int kWords = sizeof(SampleSlot) / 8;
    static_assert(sizeof(SampleSlot) % 8 == 0 && kWords <= 2 * kWarp);
    const int warp = static_cast<int>(threadIdx.x) / kWarp;
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
    const int32_t row = span.first_row() + warp;
    if (warp >= kSampleBlockRows || row * span.of_row >= span.end) {
        return;
    }
    const int32_t slot_id = __ldcg(args.row_slots + row);
    if (slot_id >= 0) {
        const auto* from = reinterpret_cast<const uint64_t*>(args.slots.slot + slot_id);
        auto* to = reinterpret_cast<uint64_t*>(shared.slots + warp);
        const uint64_t low = __ldcg(from + lane);
        const uint64_t high = lane + kWarp < kWords ? __ldcg(from + lane + kWarp) : 0;
        to[lane] = low;
        if (lane + kWarp < kWords) {
            to[lane + kWarp] = high;
        }
    }
    if (lane == 0) {
        shared.slot_ids[warp] = slot_id;
    }
}

// Reads the block's tiles of a row, from this warp's `next` on, and tells of them. Its next one then. A tile
// is asked for when the one before it is there: more under way would not come sooner, and hold up all else.
__device__ int read_row(SampleTile tile, const TileRing& ring, const TileSpan& span, int next) {
    const auto end = min(span.end, static_cast<int32_t>(tile.row + 1) * span.of_row);
    auto* words = static_cast<SampleTileWords*>(tile.args.exchange);
    const bool padding = tile.slot_id < 0;
    const SampleReading reading(tile.args, tile.slot);
    const auto go_to = [&](int i) {
        tile.x = ring.memory(i);
        tile.first = ring.tile(i) % span.of_row * kSampleTile + tile.lane % kSampleGroups * kSampleGroup;
    };
    const bool penalties = !padding && tile.slot.has_penalties();
    go_to(next);
    SampleSeen seen = penalties ? load_seen(tile) : SampleSeen();
    for (; ring.tile(next) < end; ++next) {
        ring.wait(next);
        ring.begin_again(next + 1);
        SampleSeen seen_next;
        const bool ahead = penalties && ring.tile(next + 1) < end;
        if (ahead) {
            go_to(next + 1);
            seen_next = load_seen(tile);
            go_to(next);
        }
        if (!padding) {
            tell_tile(tile, reading, seen, words[ring.tile(next)]);
        }
        go_to(next + 1);
        seen = seen_next;
        if (ahead) {
            prefetch_counts(tile, seen);
        }
    }
    return next;
}

// The token of a row of which the tiles' best tokens tell all, by one warp. told: memory for a word of each.
__device__ Choice choose_by_tiles(const SampleTile& tile, const SampleKind& kind, SampleTileWords* words,
                                  int tiles, uint4* told) {
    // What does not need the words comes before the wait for them.
    const RowWeights weigh = kind.greedy ? RowWeights() : RowWeights(tile.slot);
    const uint64_t fraction = kind.greedy ? 0 : draw_fractions(tile.slot).whole;
    Choice choice{forced_token(tile.args, tile.slot, tile.slot_id)};
    uint32_t key = kSampleEmptyKey;
    constexpr int kAtOnce = 4;
    for (int i0 = tile.lane; i0 < tiles; i0 += kAtOnce * kWarp) {
        uint4 four[kAtOnce];
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
            four[i] = i0 + i * kWarp < tiles ? get_words(words[i0 + i * kWarp].best) : uint4{};
        }
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
            if (i0 + i * kWarp < tiles) {
                told[i0 + i * kWarp] = take_words(words[i0 + i * kWarp].best, four[i], false);
                key = max(key, told[i0 + i * kWarp].x);
            }
        }
    }
    key = __reduce_max_sync(kFullWarp, key);
    __syncwarp();
    if (key >= kSampleInfinityKey) {
        choice.error = SampleError::kNotFinite;
    } else if (choice.token < 0 && key == kSampleEmptyKey) {
        choice.error = SampleError::kNoToken;
    }
    if (choice.error != SampleError::kNone || choice.token >= 0) {
        return choice;
    }
    const int each = (tiles + kWarp - 1) / kWarp;  // neighbours of one lane
    const int first = tile.lane * each;
    const int end = min(first + each, tiles);
    int at = first;
    int owner = 0;
    if (kind.greedy) {
        while (at < end && told[at].x != key) {
            ++at;
        }
        owner = first_lane(at < end);
    } else {
        const auto mass = [&](int i) {
            return weigh.tile_mass(uint64_t{told[i].w} << 32 | told[i].z, from_ordered_bits(told[i].x),
                                   from_ordered_bits(key));
        };
        uint64_t own = 0;
        for (int i = first; i < end; ++i) {
            own += mass(i);
        }
        const uint64_t scan = warp_scan(own, tile.lane);
        const uint64_t point = __umul64hi(fraction, __shfl_sync(kFullWarp, scan, kWarp - 1));
        owner = first_lane(scan > point);
        uint64_t rest = point - (scan - own);
        for (uint64_t m = 0; tile.lane == owner && rest >= (m = mass(at)); ++at) {
            rest -= m;
        }
    }
    const int32_t token = at < end ? at * kSampleTile + static_cast<int32_t>(told[at].y) : 0;
    choice.token = __shfl_sync(kFullWarp, token, owner);
    return choice;
}

// Draws from what top_k, min_p and top_p leave. For the whole block.
__device__ Choice choose_cut(SampleBlock& block, const SampleKind& kind) {
    const SampleSlot& slot = block.slot();
    const SampleGroupKeys keys(block, false);
    SampleDraw draw{RowWeights(slot), from_ordered_bits(keys.largest)};
    draw.fraction = draw_fractions(slot).whole;
    draw.top_k = kind.top_k;
    if (kind.by_tiles) {
        uint64_t mass = 0;
        if (threadIdx.x < static_cast<unsigned>(block.tiles)) {
            uint32_t* from = block.words[threadIdx.x].best;
            const uint4 told = take_words(from, get_words(from), false);
            mass =
                draw.weigh.tile_mass(uint64_t{told.w} << 32 | told.z, from_ordered_bits(told.x), draw.best);
        }
        draw.whole = static_cast<double>(block.reduce(mass, Sum{})) / (1 << SampleWeightConstants::kTileBits);
    }
    if (keys.largest >= kSampleInfinityKey) {
        return {-1, SampleError::kNotFinite};
    }
    if (keys.largest == kSampleEmptyKey) {
        return {-1, SampleError::kNoToken};
    }
    int32_t token = -1;
    if (kind.top_k <= kSampleBestMax) {
        uint32_t bound = kSampleEmptyKey + 1;
        if (kind.top_k > 0 || kind.by_tiles) {
            bound = keys.bound(block, static_cast<uint32_t>(kind.top_k > 0 ? kind.top_k : kSampleNucleus));
        }
        if (slot.min_p > 0) {
            const float least = draw.weigh.least_logit(draw.best, slot.min_p);
            bound = least > minus_infinity() ? max(bound, ordered_bits(least)) : bound;
        }
        if (list_tokens(block, keys, bound, kind.edited)) {
            token = draw_from_list(block, draw);
        }
    }
    if (token < 0) {
        token = draw_slowly(block, draw, kind.edited);
    }
    return {token};
}

// Finishes a row whose tiles' best tokens do not tell all. For the whole block.
__device__ void finish_by_block(SampleBlock& block, const SampleKind& kind) {
    const double log_sum = block.slot().logprobs != 0 ? report_top(block) : 0;
    Choice choice;
    if (kind.cut) {
        choice = choose_cut(block, kind);
    } else if (block.warp() == 0) {
        choice = choose_by_tiles(block.tile, kind, block.words, block.tiles, block.shared.told);
    }
    if (threadIdx.x == 0) {
        finish_row(block.tile, choice, log_sum);
    }
    __syncthreads();  // its memory is used again
}

// Finishes a row of which this block has the last tile; other blocks may still have to tell of theirs. The
// whole block calls this; a row of which the tiles' best tokens tell all is left to the warp of its last
// tile.
__device__ void finish(SampleShared& shared, const SampleTile& tile, const TileSpan& span) {
    const SampleKind kind(tile.args, tile.slot);
    SampleTileWords* words = static_cast<SampleTileWords*>(tile.args.exchange) + tile.row * span.of_row;
    if (kind.cut || tile.slot.logprobs != 0 || span.of_row > kToldMax) {
        __syncthreads();  // all warps have told of their tiles
        SampleBlock block{tile.args, shared, words, span.of_row, tile};
        finish_by_block(block, kind);
        return;
    }
    const auto last = static_cast<int32_t>((tile.row + 1) * span.of_row) - 1;
    if ((last - span.begin) % kSampleWarps == static_cast<int32_t>(threadIdx.x) / kWarp) {
        auto* told = reinterpret_cast<uint4*>(tile.x);
        const Choice choice = choose_by_tiles(tile, kind, words, span.of_row, told);
        if (tile.lane == 0) {
            finish_row(tile, choice, 0);
        }
        __syncwarp();
    }
}

__global__ void __launch_bounds__(kSampleThreads, 1) sample_kernel(const SampleCudaArgs args) {
    extern __shared__ __align__(128) unsigned char memory[];
    SampleShared& shared = *reinterpret_cast<SampleShared*>(memory + kRingBytes);
    const int warp = static_cast<int>(threadIdx.x) / kWarp;
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
    float* const own = reinterpret_cast<float*>(memory) + warp * (kSampleRing + 1) * kSampleTile;
    const TileSpan span(args);
    const TileRing ring(args, span, own, shared.barriers[warp]);
    const int32_t first_row = span.first_row();
    let_next_kernel_start();
    wait_for_previous_kernel();
    // As much as comes while the slots come.
    if (warp < kSampleWarps / 2) {
        ring.begin(0);
    }
    load_slots(args, shared, span);
    __syncthreads();
    if (warp >= kSampleWarps / 2) {
        ring.begin(0);
    }

    const auto tile_of = [&](int32_t row) {
        const int local = row - first_row;
        SampleTile tile{args, shared.slots[local], row, shared.slot_ids[local],
                        own + kSampleRing * kSampleTile};
        tile.lane = lane;
        return tile;
    };
    const int32_t rows = (span.end - 1) / span.of_row - first_row + 1;
    int next = 0;  // of this warp's tiles
    for (int32_t n = 0; n <= rows; ++n) {
        // Other blocks may have tiles of the first row: it is finished when all others have been read.
        const SampleTile tile = tile_of(first_row + (n < rows ? n : 0));
        if (n < rows) {
            next = read_row(tile, ring, span, next);
        }
        if (n > 0 && (tile.row + 1) * span.of_row <= span.end && tile.slot_id >= 0) {
            finish(shared, tile, span);
        }
    }
}

__global__ void sample_history_kernel(SampleHistoryArgs args) {
    const int64_t words = (args.vocab + 63) / 64;
    const auto set = [](uint64_t* bits, int32_t id) {
        atomicOr(reinterpret_cast<unsigned long long*>(bits) + id / 64, 1ull << (id % 64));
    };
    const int64_t i = blockIdx.x * static_cast<int64_t>(blockDim.x) + threadIdx.x;
    if (i < args.prompt_count) {
        set(args.slots.prompt_seen + args.slot * words, args.prompt[i]);
    }
    if (i < args.output_count) {
        count_output(args.slots, args.vocab, args.slot, args.output[i]);
    }
}

}  // namespace

int64_t sample_cuda_exchange_bytes(int64_t vocab, int64_t rows) {
    return std::max(rows * tiles_of(vocab) * static_cast<int64_t>(sizeof(SampleTileWords)),
                    sample_few_exchange_bytes(vocab, std::min(rows, kSampleFewRows)));
}

Status sample_cuda_prepare(int64_t vocab) {
    if (vocab > kSampleCudaVocabMax) {
        return invalid_argument("a vocabulary of " + std::to_string(vocab) +
                                " tokens; the CUDA sampler takes " + std::to_string(kSampleCudaVocabMax) +
                                " at most");
    }
    cuda_check(
        cudaFuncSetAttribute(sample_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes));
    sample_few_prepare();
    return Status();
}

void sample_cuda(cudaStream_t stream, const SampleCudaArgs& args) {
    check(args.vocab > 0 && args.vocab <= kSampleCudaVocabMax && args.rows <= kSampleCudaRowsMax,
          "sample: at most kSampleCudaRowsMax rows of kSampleCudaVocabMax logits");
    if (args.rows == 0 || sample_few(stream, args)) {
        return;
    }
    // A block waits for those before it, which run already: blocks begin in their order. More blocks than
    // multiprocessors only where one would have tiles of too many rows.
    const int64_t least = (args.rows + kSampleBlockRows - 3) / (kSampleBlockRows - 2);
    const int64_t blocks =
        std::min(args.rows * tiles_of(args.vocab), std::max<int64_t>(args.sm_count, least));
    cuda_check(launch_dependent({.grid = dim3(static_cast<unsigned>(blocks)),
                                 .threads = kSampleThreads,
                                 .shared_bytes = kSharedBytes,
                                 .stream = stream},
                                sample_kernel, args));
}

void sample_history_cuda(cudaStream_t stream, const SampleHistoryArgs& args) {
    const int64_t words = (args.vocab + 63) / 64;
    const auto clear = [stream](auto* from, int64_t count) {
        cuda_check(cudaMemsetAsync(from, 0, static_cast<size_t>(count) * sizeof *from, stream));
    };
    clear(args.slots.prompt_seen + args.slot * words, words);
    clear(args.slots.output_seen + args.slot * words, words);
    clear(args.slots.output_often + args.slot * words, words);
    clear(args.slots.output_counts + args.slot * args.vocab, args.vocab);
    const int64_t count = args.prompt_count > args.output_count ? args.prompt_count : args.output_count;
    if (count == 0) {
        return;
    }
    constexpr int kThreads = 256;
    sample_history_kernel<<<static_cast<unsigned>((count + kThreads - 1) / kThreads), kThreads, 0, stream>>>(
        args);
    cuda_check_launch();
}

}  // namespace tessera

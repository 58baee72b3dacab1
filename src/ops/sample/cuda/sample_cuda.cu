// Roofline: 4 bytes a logit at 4.27 TB/s: 0.11 us a row of 120,832. Every logit is read once from memory, and
// nothing waits for another block before all of a block's logits are read: a tile of 1,024 ids is weighed by
// its own best token. The block that has a row's last tile then finishes the row from the tiles' words; what
// it needs of the logits themselves comes from the level-2 cache. See README.md.
#include <algorithm>
#include <string>

#include "base/check.h"
#include "device/cuda/cuda_check.h"
#include "ops/common/cuda/dependent_launch.cuh"
#include "ops/sample/cuda/sample_few.h"
#include "ops/sample/cuda/sample_gather.cuh"
#include "ops/sample/cuda/sample_report.cuh"
#include "ops/sample/cuda/sample_ring.cuh"

namespace tessera {
namespace {

using namespace cuda;

// A warp has its ring, and memory for one more tile.
constexpr int kRingBytes = kSampleWarps * (kSampleRing + 1) * kSampleTile * 4;
constexpr int kSharedBytes = kRingBytes + static_cast<int>(sizeof(SampleShared) + sizeof(SampleGathered));
static_assert(kSharedBytes <= 232448 && sizeof(SampleShared) % 16 == 0);

constexpr int kToldMax = kSampleTile / 4;  // in a warp's memory

// Loads the slots of the block's rows, for the whole block, and begins to read: the first tiles of half of
// the warps before the slots, of the others behind them. A barrier follows.
__device__ void begin_block(const SampleCudaArgs& args, SampleShared& shared, const TileSpan& span,
                            const TileRing& ring) {
    const int warp = static_cast<int>(threadIdx.x) / kWarp;
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
    const int32_t row = span.first_row() + warp;
    const bool mine = warp < kSampleBlockRows && row * span.of_row < span.end;
    const int32_t slot_id = mine ? __ldcg(args.row_slots + row) : -1;
    if (warp < kSampleWarps / 2) {
        ring.begin(0);
    }
    SlotWords words;
    if (slot_id >= 0) {
        words.load(args.slots.slot + slot_id, lane);
    }
    __syncthreads();  // the slots are asked for
    if (warp >= kSampleWarps / 2) {
        ring.begin(0);
    }
    if (slot_id >= 0) {
        words.store(shared.slots[warp], lane);
    }
    if (mine && lane == 0) {
        shared.slot_ids[warp] = slot_id;
    }
    __syncwarp();
    if (slot_id >= 0 && !is_greedy(shared.slots[warp])) {
        const RowWeights weigh(shared.slots[warp]);
        const SampleFractions fractions = draw_fractions(shared.slots[warp]);
        if (lane == 0) {
            shared.slots[warp].weigh = weigh;
            shared.slots[warp].fractions = fractions;
        }
    }
}

// Reads the block's tiles of a row, from this warp's `next` on, and tells of them. Its next one then. A tile
// is asked for when the one before it is there: more under way would not come sooner, and hold up all else.
template <bool Gathers>
__device__ int read_row(SampleTile tile, const TileRing& ring, const TileSpan& span, int next,
                        const SampleGather& gather) {
    const int32_t end = min(span.end, (tile.row + 1) * span.of_row);
    auto* words = static_cast<SampleTileWords*>(tile.args.exchange);
    const bool padding = tile.slot_id < 0;
    const SampleKind kind(tile.args, tile.slot);
    const int32_t row_begin = tile.row * span.of_row;
    const auto go_to = [&](int i) {
        tile.x = ring.memory(i);
        tile.first = (ring.tile(i) - row_begin) * kSampleTile + tile.lane % kSampleGroups * kSampleGroup;
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
            const int number = ring.tile(next) - row_begin;
            tell_tile<Gathers>(tile, kind, seen, words[ring.tile(next)],
                               [&](uint4 value) { gather.tell(number, value); });
        }
        go_to(next + 1);
        seen = seen_next;
        if (ahead) {
            prefetch_counts(tile, seen);
        }
    }
    return next;
}

// What the tiles of a row tell, as it comes, by one warp. The lane's largest key.
__device__ uint32_t take_told(SampleTileWords* words, int tiles, uint4* told) {
    uint32_t key = kSampleEmptyKey;
    constexpr int kAtOnce = 4;
    for (int i0 = static_cast<int>(threadIdx.x) % kWarp; i0 < tiles; i0 += kAtOnce * kWarp) {
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
    return key;
}

// The token of a row of which the tiles' best tokens tell all, by one warp. told: of all tiles, once wait()
// has returned the lane's largest key.
template <typename Wait>
__device__ Choice choose_by_tiles(const SampleTile& tile, const SampleKind& kind, int tiles,
                                  const uint4* told, Wait wait) {
    // What does not need the words comes before the wait for them.
    const RowWeights weigh = kind.greedy ? RowWeights() : tile.slot.weigh;
    const uint64_t fraction = kind.greedy ? 0 : tile.slot.fractions.whole;
    Choice choice{forced_token(tile.args, tile.slot, tile.slot_id)};
    uint32_t key = wait();
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
    SampleDraw draw{block.tile.slot.weigh, from_ordered_bits(keys.largest)};
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

// Finishes a row, by the whole block. Where nothing cuts, its last warp chooses, and the others need not wait
// for it unless `wait`. choose(): the token of a row that nothing cuts.
template <typename Choose>
__device__ void finish_by_block(SampleBlock& block, const SampleKind& kind, bool wait, Choose choose) {
    const double log_sum = block.slot().logprobs != 0 ? report_top(block) : 0;
    Choice choice;
    if (kind.cut) {
        choice = choose_cut(block, kind);
    } else if (block.warp() == kSampleWarps - 1) {
        choice = choose();
    }
    if (threadIdx.x == kSampleThreads - 1) {
        finish_row(block.tile, choice, log_sum);
    }
    if (wait) {
        __syncthreads();  // its memory is used again
    }
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
        finish_by_block(block, kind, true, [&] {
            uint4* told = shared.told;
            return choose_by_tiles(tile, kind, span.of_row, told,
                                   [&] { return take_told(words, span.of_row, told); });
        });
        return;
    }
    const int32_t last = (tile.row + 1) * span.of_row - 1;
    if ((last - span.begin) % kSampleWarps == static_cast<int32_t>(threadIdx.x) / kWarp) {
        auto* told = reinterpret_cast<uint4*>(tile.x);
        const Choice choice = choose_by_tiles(tile, kind, span.of_row, told,
                                              [&] { return take_told(words, span.of_row, told); });
        if (tile.lane == 0) {
            finish_row(tile, choice, 0);
        }
        __syncwarp();
    }
}

// The same for a row that was gathered.
__device__ void finish_gathered(SampleBlock& block, const SampleGather& gather) {
    const SampleKind kind(block.args, block.slot());
    const bool whole = kind.cut || block.slot().logprobs != 0;
    if (whole) {
        gather.wait();
    }
    finish_by_block(block, kind, whole, [&] {
        const uint4* told = gather.told();
        return choose_by_tiles(block.tile, kind, block.tiles, told, [&] {
            gather.wait();
            uint32_t key = kSampleEmptyKey;
            for (int i = block.tile.lane; i < block.tiles; i += kWarp) {
                key = max(key, told[i].x);
            }
            return key;
        });
    });
}

template <bool Gathers>
__global__ void __launch_bounds__(kSampleThreads, 1) sample_kernel(const SampleCudaArgs args) {
    extern __shared__ __align__(128) unsigned char memory[];
    SampleShared& shared = *reinterpret_cast<SampleShared*>(memory + kRingBytes);
    SampleGathered& gathered = *reinterpret_cast<SampleGathered*>(memory + kRingBytes + sizeof(SampleShared));
    const int warp = static_cast<int>(threadIdx.x) / kWarp;
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
    float* const own = reinterpret_cast<float*>(memory) + warp * (kSampleRing + 1) * kSampleTile;
    const TileSpan span(args, Gathers);
    const SampleGather gather(gathered);
    const TileRing ring(args, span, own, shared.barriers[warp]);
    const int32_t first_row = span.first_row();
    if (Gathers) {
        gather.begin();
        cluster_arrive();
    }
    let_next_kernel_start();
    wait_for_previous_kernel();
    begin_block(args, shared, span, ring);
    __syncthreads();

    const auto tile_of = [&](int32_t row) {
        const int local = row - first_row;
        SampleTile tile{args, shared.slots[local], row, shared.slot_ids[local],
                        own + kSampleRing * kSampleTile};
        tile.lane = lane;
        return tile;
    };
    int next = 0;  // of this warp's tiles
    if constexpr (Gathers) {
        cluster_wait();
        const SampleTile tile = tile_of(first_row);
        read_row<true>(tile, ring, span, next, gather);
        gather.end();
        if (cluster_rank() == 0 && tile.slot_id >= 0) {
            auto* words = static_cast<SampleTileWords*>(args.exchange) + tile.row * span.of_row;
            SampleBlock block{args, shared, words, span.of_row, tile};
            finish_gathered(block, gather);
        } else if (cluster_rank() == 0) {
            gather.wait();  // the other block still arrives here
        }
        if constexpr (kAllArrive) {
            cluster_sync();  // racecheck does not count that the first block waits for the other's words
        }
    } else {
        const int32_t rows = (span.end - 1) / span.of_row - first_row + 1;
        for (int32_t n = 0; n <= rows; ++n) {
            // Other blocks may have tiles of the first row: it is finished when all others have been read.
            const SampleTile tile = tile_of(first_row + (n < rows ? n : 0));
            if (n < rows) {
                next = read_row<false>(tile, ring, span, next, gather);
            }
            if (n > 0 && (tile.row + 1) * span.of_row <= span.end && tile.slot_id >= 0) {
                finish(shared, tile, span);
            }
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

// Of how many blocks a cluster gathers each row. 0: where that leaves too many multiprocessors without work.
int64_t gather_blocks(const SampleCudaArgs& args) {
    const int64_t tiles = tiles_of(args.vocab);
    for (const int64_t team : {2, 1}) {
        const int64_t blocks = args.rows * team;
        if (tiles / team >= kSampleWarps && tiles <= kGatherTiles && blocks <= args.sm_count &&
            10 * blocks >= 8 * args.sm_count) {
            return team;
        }
    }
    return 0;
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
    for (const auto kernel : {sample_kernel<false>, sample_kernel<true>}) {
        cuda_check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes));
    }
    sample_few_prepare();
    return Status();
}

void sample_cuda(cudaStream_t stream, const SampleCudaArgs& args) {
    check(args.vocab > 0 && args.vocab <= kSampleCudaVocabMax && args.rows <= kSampleCudaRowsMax,
          "sample: at most kSampleCudaRowsMax rows of kSampleCudaVocabMax logits");
    if (args.rows == 0 || sample_few(stream, args)) {
        return;
    }
    if (const int64_t team = gather_blocks(args); team > 0) {
        cuda_check(launch_dependent({.grid = dim3(static_cast<unsigned>(args.rows * team)),
                                     .threads = kSampleThreads,
                                     .shared_bytes = kSharedBytes,
                                     .stream = stream,
                                     .cluster = static_cast<int>(team)},
                                    sample_kernel<true>, args));
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
                                sample_kernel<false>, args));
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

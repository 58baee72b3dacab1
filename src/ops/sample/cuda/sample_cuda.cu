// Roofline: 4 bytes a logit at 4.27 TB/s: 0.11 us a row of 120,832. Two kernels, the second of which may
// start while the first still runs. The first reads every logit once from memory: a tile of 1,024 ids is
// edited and weighed by its own best token. The second has a block for each row, which finishes it from what
// its tiles told; what it needs of the logits themselves comes from the level-2 cache. See README.md.
#include <algorithm>
#include <string>

#include "base/check.h"
#include "device/cuda/cuda_check.h"
#include "ops/common/cuda/dependent_launch.cuh"
#include "ops/sample/cuda/sample_few.h"
#include "ops/sample/cuda/sample_finish.cuh"
#include "ops/sample/cuda/sample_ring.cuh"

namespace tessera {
namespace {

using namespace cuda;

constexpr int kReadRows = 16;       // that one block has tiles of
constexpr int kReadRegisters = 72;  // of a thread

struct ReadShared {
    float rings[kReadWarps][kSampleRing][kSampleTile];
    SampleRowSlot slots[kReadRows];  // as they were before this launch
    uint64_t barriers[kReadWarps][kSampleRing];
};
struct FinishShared {
    float tiles[kSampleWarps][kSampleTile];
    SampleShared sample;
    QuickShared quick;
};
constexpr int kReadBytes = static_cast<int>(sizeof(ReadShared));
constexpr int kFinishBytes = static_cast<int>(sizeof(FinishShared));
constexpr int kFinishAloneBytes = 120 * 1024;  // so that no two are on one multiprocessor
static_assert(kReadBytes <= 232448 && kReadWarps >= kReadRows);
static_assert(2 * kFinishBytes <= 232448 && 2 * kFinishAloneBytes > 232448);

// Brings a row's slot into shared memory, by one warp. A first look at the row's slot is taken while the
// kernel before still runs.
class SlotLoad {
  public:
    // row < 0: none
    __device__ SlotLoad(const SampleCudaArgs& args, int32_t row) : args_(args), row_(row) { id_ = look(); }

    // Asks for the slot, once the kernel before has ended.
    __device__ void begin() {
        certain_id_ = look();
        load();
    }
    __device__ void end(SampleRowSlot& slot) {
        if (row_ < 0) {
            return;
        }
        if (certain_id_ != id_) {
            id_ = certain_id_;
            load();
        }
        if (id_ >= 0) {
            words_.store(slot, lane());
        }
        __syncwarp();
        if (lane() == 0) {
            slot.id = id_;
        }
        if (id_ < 0) {
            return;
        }
        const bool greedy = is_greedy(slot);
        const RowWeights weigh = greedy ? RowWeights() : RowWeights(slot);
        const SampleFractions fractions = greedy ? SampleFractions() : draw_fractions(slot);
        if (lane() == 0) {
            slot.kind = SampleKind(args_, slot);
            slot.weigh = weigh;
            slot.fractions = fractions;
        }
    }

  private:
    __device__ static int lane() { return static_cast<int>(threadIdx.x) % kWarp; }
    __device__ int32_t look() const { return row_ >= 0 ? load_id(args_.row_slots + row_) : -1; }
    __device__ void load() {
        if (id_ >= 0) {
            words_.load(args_.slots.slot + id_, lane());
        }
    }

    const SampleCudaArgs& args_;
    int32_t row_;
    int32_t id_ = -1;
    int32_t certain_id_ = -1;
    SlotWords words_;
};

// Reads the block's tiles of a row, from this warp's `next` on, and tells of them. Its next one then. A tile
// is asked for when the one before it is there: more under way would not come sooner, and hold up all else.
__device__ int read_row(SampleTile tile, const TileRing& ring, const TileSpan& span, int next) {
    const int32_t end = min(span.end, (tile.row + 1) * span.of_row);
    auto* words = static_cast<SampleTileWords*>(tile.args.exchange);
    const bool padding = tile.slot.id < 0;
    const SampleKind& kind = tile.slot.kind;
    const int32_t row_begin = tile.row * span.of_row;
    const auto go_to = [&](int i) {
        tile.x = ring.memory(i);
        tile.first = (ring.tile(i) - row_begin) * kSampleTile + tile.lane % kSampleGroups * kSampleGroup;
    };
    const bool penalties = !padding && tile.slot.has_penalties();
    const auto seen_of = [&](int i) {
        return load_seen(tile, (ring.tile(i) - row_begin) * kWarp + tile.lane);
    };
    SampleSeen seen;
    if (penalties) {
        seen = seen_of(next);
    }
    for (; ring.tile(next) < end; ++next) {
        go_to(next);
        ring.wait(next);
        ring.begin_again(next + 1);
        SampleSeen seen_next;
        const bool ahead = penalties && ring.tile(next + 1) < end;
        if (ahead) {
            seen_next = seen_of(next + 1);
        }
        if (!padding) {
            tell_tile(tile, kind, seen, words[ring.tile(next)]);
        }
        seen = seen_next;
        if (ahead) {
            prefetch_counts(tile, seen);
        }
    }
    return next;
}

__global__ void __maxnreg__(kReadRegisters) sample_read_kernel(const SampleCudaArgs args) {
    extern __shared__ __align__(128) unsigned char memory[];
    ReadShared& shared = *reinterpret_cast<ReadShared*>(memory);
    const int warp = static_cast<int>(threadIdx.x) / kWarp;
    const TileSpan span(args);
    const TileRing ring(args, span, shared.rings[warp][0], shared.barriers[warp]);
    const int32_t first_row = span.first_row();
    const int32_t own_row = first_row + warp;
    const bool has_row = warp < kReadRows && own_row * span.of_row < span.end;
    SlotLoad slot(args, has_row ? own_row : -1);
    wait_for_previous_kernel();
    // The slots, the first tiles of half of the warps, and once the slots are there those of the others: what
    // is asked for behind a multiprocessor's whole memory comes late.
    slot.begin();
    let_next_kernel_start();  // the kernels before this one have ended
    __syncthreads();
    if (warp < kReadWarps / 2) {
        ring.begin(0);
    }
    slot.end(shared.slots[warp % kReadRows]);
    __syncthreads();
    if (warp >= kReadWarps / 2) {
        ring.begin(0);
    }
    const int32_t rows = (span.end - 1) / span.of_row - first_row + 1;
    int next = 0;  // of this warp's tiles
    for (int32_t n = 0; n < rows; ++n) {
        SampleTile tile{args, shared.slots[n], first_row + n};
        tile.lane = static_cast<int>(threadIdx.x) % kWarp;
        next = read_row(tile, ring, span, next);
    }
}

__global__ void __launch_bounds__(kSampleThreads, 2) sample_finish_kernel(const SampleCudaArgs args) {
    extern __shared__ __align__(128) unsigned char memory[];
    FinishShared& shared = *reinterpret_cast<FinishShared*>(memory);
    SampleRowSlot& slot = shared.sample.slot;
    const int warp = static_cast<int>(threadIdx.x) / kWarp;
    let_next_kernel_start();
    // The kernel before leaves the slots as they were, and those before it had ended when this one started.
    SlotLoad load(args, warp == 0 ? static_cast<int32_t>(blockIdx.x) : -1);
    load.begin();
    load.end(slot);
    __syncthreads();
    const auto tiles = static_cast<int>((args.vocab + kSampleTile - 1) / kSampleTile);
    SampleTile tile{args, slot, static_cast<int32_t>(blockIdx.x), shared.tiles[warp]};
    tile.lane = static_cast<int>(threadIdx.x) % kWarp;
    SampleBlock block{args, shared.sample, static_cast<SampleTileWords*>(args.exchange), tiles, tile};
    block.words += static_cast<int64_t>(blockIdx.x) * tiles;
    block.marked = false;
    const bool by_one_warp = slot.id >= 0 && !slot.kind.cut && slot.logprobs == 0 && tiles <= kQuickTiles;
    wait_for_previous_kernel();
    if (by_one_warp) {
        Choice choice;
        if (warp == 0 && quick_tile(block, slot.kind, choice) == QuickOutcome::kMine) {
            finish_row(tile, choice, 0);
        }
    } else if (slot.id >= 0) {
        finish_block(block, shared.quick, slot.kind);
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

// The words of sample_few() come first: they are zeros between the calls, the others need not be.
int64_t few_bytes(int64_t vocab) {
    return sample_few_exchange_bytes(vocab, kSampleFewRows);
}

}  // namespace

int64_t sample_cuda_exchange_bytes(int64_t vocab, int64_t rows) {
    return few_bytes(vocab) + rows * tiles_of(vocab) * static_cast<int64_t>(sizeof(SampleTileWords));
}

Status sample_cuda_prepare(int64_t vocab) {
    if (vocab > kSampleCudaVocabMax) {
        return invalid_argument("a vocabulary of " + std::to_string(vocab) +
                                " tokens; the CUDA sampler takes " + std::to_string(kSampleCudaVocabMax) +
                                " at most");
    }
    const auto prepare = [](auto kernel, int bytes) {
        cuda_check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
        cuda_check(cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                                        cudaSharedmemCarveoutMaxShared));
    };
    prepare(sample_read_kernel, kReadBytes);
    prepare(sample_finish_kernel, kFinishAloneBytes);
    sample_few_prepare();
    return Status();
}

void sample_cuda(cudaStream_t stream, const SampleCudaArgs& args) {
    check(args.vocab > 0 && args.vocab <= kSampleCudaVocabMax && args.rows <= kSampleCudaRowsMax,
          "sample: at most kSampleCudaRowsMax rows of kSampleCudaVocabMax logits");
    if (args.rows == 0 || sample_few(stream, args)) {
        return;
    }
    // More blocks than multiprocessors only where one would have tiles of too many rows.
    const int64_t least = (args.rows + kReadRows - 3) / (kReadRows - 2);
    const int64_t blocks =
        std::min(args.rows * tiles_of(args.vocab), std::max<int64_t>(args.sm_count, least));
    SampleCudaArgs many = args;
    many.exchange = static_cast<std::byte*>(args.exchange) + few_bytes(args.vocab);
    cuda_check(launch_dependent({.grid = dim3(static_cast<unsigned>(blocks)),
                                 .threads = kReadWarps * kWarp,
                                 .shared_bytes = kReadBytes,
                                 .stream = stream},
                                sample_read_kernel, many));
    const bool alone = args.rows <= args.sm_count;
    cuda_check(launch_dependent({.grid = dim3(static_cast<unsigned>(args.rows)),
                                 .threads = kSampleThreads,
                                 .shared_bytes = alone ? kFinishAloneBytes : kFinishBytes,
                                 .stream = stream},
                                sample_finish_kernel, many));
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

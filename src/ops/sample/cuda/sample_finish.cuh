// A row finished by a block of its own, in a kernel of its own behind the one that reads: what the tiles told
// lies in the exchange.
#pragma once

#include "ops/sample/cuda/sample_quick.cuh"
#include "ops/sample/cuda/sample_report.cuh"

namespace tessera::cuda {

// The token of a row of which the tiles' best tokens tell all, by one warp. told: memory for all tiles.
__device__ inline Choice choose_by_tiles(const SampleBlock& block, const SampleKind& kind, uint4* told) {
    const SampleTile& tile = block.tile;
    const int tiles = block.tiles;
    const RowWeights weigh = kind.greedy ? RowWeights() : tile.slot.weigh;
    const uint64_t fraction = kind.greedy ? 0 : tile.slot.fractions.whole;
    Choice choice{forced_token(tile.args, tile.slot, tile.slot.id)};
    uint32_t key = kSampleEmptyKey;
    constexpr int kAtOnce = 4;
    for (int i0 = tile.lane; i0 < tiles; i0 += kAtOnce * kWarp) {
        uint4 four[kAtOnce];
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
            four[i] = i0 + i * kWarp < tiles ? get_words(block.words[i0 + i * kWarp].best) : uint4{};
        }
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
            if (i0 + i * kWarp < tiles) {
                told[i0 + i * kWarp] = four[i];
                key = max(key, four[i].x);
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
__device__ inline Choice choose_cut(SampleBlock& block, const SampleKind& kind) {
    const SampleRowSlot& slot = block.tile.slot;
    const RowWeights& slot_weigh = slot.weigh;
    const SampleGroupKeys keys(block, false);
    SampleDraw& draw = block.shared.draw;
    const float best = from_ordered_bits(keys.largest);
    if (threadIdx.x == 0) {
        draw.weigh = block.tile.slot.weigh;
        draw.best = best;
        draw.top_k = kind.top_k;
        draw.whole = 0;
    }
    if (kind.by_tiles) {
        uint64_t mass = 0;
        if (threadIdx.x < static_cast<unsigned>(block.tiles)) {
            const uint4 told = get_words(block.words[threadIdx.x].best);
            mass = block.tile.slot.weigh.tile_mass(uint64_t{told.w} << 32 | told.z, from_ordered_bits(told.x),
                                                   best);
        }
        mass = block.reduce(mass, Sum{});
        if (threadIdx.x == 0) {
            draw.whole = static_cast<double>(mass) / (1 << SampleWeightConstants::kTileBits);
        }
    }
    __syncthreads();
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
            const float least = slot_weigh.least_logit(best, slot.min_p);
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

// The token of a row. For the whole block; one thread has the outcome kMine.
__device__ inline QuickOutcome choose(SampleBlock& block, QuickShared& quick, const SampleKind& kind,
                                      Choice& choice) {
    if (!kind.cut) {
        if (block.warp() != 0) {
            return QuickOutcome::kOther;
        }
        if (block.tiles <= kQuickTiles) {
            return quick_tile(block, kind, choice);
        }
        choice = choose_by_tiles(block, kind, block.shared.told);
    } else {
        const int k = kind.top_k > 0 ? kind.top_k : kSampleNucleus;
        if ((kind.top_k > 0 || kind.by_tiles) && quick_takes(block, k)) {
            const QuickOutcome outcome = quick_cut(block, quick, kind, choice);
            if (outcome != QuickOutcome::kMore) {
                return outcome;
            }
        }
        choice = choose_cut(block, kind);
    }
    return threadIdx.x == 0 ? QuickOutcome::kMine : QuickOutcome::kOther;
}

// Finishes a row, by the whole block.
__device__ inline void finish_block(SampleBlock& block, QuickShared& quick, const SampleKind& kind) {
    if (block.slot().logprobs != 0) {
        const int top = min(block.slot().top, kSampleTopMax);
        double log_sum = 0;
        if (top <= 0 || !quick_takes(block, top) || !quick_report(block, quick, log_sum)) {
            log_sum = report_top(block);
        }
        if (threadIdx.x == 0) {
            block.shared.log_sum = log_sum;
        }
        __syncthreads();
    }
    Choice choice;
    if (choose(block, quick, kind, choice) == QuickOutcome::kMine) {
        finish_row(block.tile, choice, block.shared.log_sum);
    }
}

}  // namespace tessera::cuda

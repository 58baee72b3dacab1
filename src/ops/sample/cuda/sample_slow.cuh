// The slow way of one thread block: what is kept is found by passes over the whole row, whose tiles are read
// from the level-2 cache and edited anew each time. For cuts further down than the listed tokens reach, and
// for many equal logits.
#pragma once

#include "ops/sample/cuda/sample_block.cuh"

namespace tessera::cuda {

__device__ inline void bring_tile(SampleTile& tile, int number, bool edited) {
    tile.first = number * kSampleTile + tile.lane % kSampleGroups * kSampleGroup;
    const SampleSeen seen = edited ? load_seen(tile) : SampleSeen();
    load_groups(tile, kSampleGroups);
    if (edited) {
        edit_tile(tile, seen);
    }
}

// f(logit, its place in the tile) for each of the block's tile, spread over the lanes.
template <typename F>
__device__ __forceinline__ void for_each_logit(const SampleBlock& block, F f) {
    const SampleTile& tile = block.tile;
#pragma unroll 4
    for (int32_t i = 0; i < kSampleTile; i += kWarp) {
        f(tile.x[i + tile.lane], i + tile.lane);
    }
}

// f(the tile's number) for each tile of the row, which has been brought; spread over the warps.
template <typename F>
__device__ inline void for_each_tile(SampleBlock& block, bool edited, F f) {
#pragma unroll 1
    for (int number = block.warp(); number < block.tiles; number += kSampleWarps) {
        bring_tile(block.tile, number, edited);
        f(number);
        __syncwarp();
    }
}

// The listed key from which on reached(count, mass) holds. shared.reach: the sums before those listed. A
// thread each token.
template <typename Reached>
__device__ inline void reach_in_list(const SampleBlock& block, Reached reached) {
    SampleShared& shared = block.shared;
    const auto count = static_cast<int>(shared.token_count);
    SampleReach mine = shared.reach;
    mine.key = threadIdx.x < shared.token_count ? static_cast<uint32_t>(shared.list[threadIdx.x] >> 32) : 0;
    mine.ties = 0;
    uint64_t own = 0;
#pragma unroll 1
    for (int j = 0; j < count; ++j) {
        const auto key = static_cast<uint32_t>(shared.list[j] >> 32);
        const uint32_t weight = shared.weights[j];
        mine.count += key > mine.key ? 1 : 0;
        mine.mass += key > mine.key ? weight : 0;
        mine.ties += key == mine.key ? 1 : 0;
        own += key == mine.key ? weight : 0;
    }
    __syncthreads();
    if (mine.key > 0 && !reached(mine.count, mine.mass) && reached(mine.count + mine.ties, mine.mass + own)) {
        shared.reach = mine;  // of equal tokens each writes the same
    }
    __syncthreads();
}

// reached(count, mass) holds nowhere or from some token on. At most four passes, each over 512 ranges of keys
// in the range that the one before has found; one more lists a range that holds few tokens.
template <typename Reached>
__device__ inline SampleReach reach(SampleBlock& block, const SampleDraw& draw, bool edited,
                                    Reached reached) {
    constexpr int kLowBits = 13;
    SampleShared& shared = block.shared;
    SampleBuckets& buckets = shared.buckets;
    const uint32_t range = kSampleListMax - 1 - threadIdx.x;  // the best first
    uint32_t low = kSampleEmptyKey + 1;
    uint32_t high = ordered_bits(draw.best);
    __syncthreads();
    if (threadIdx.x == 0) {
        shared.reach = SampleReach();
    }
    while (true) {
        const int shift = max(0, 32 - __clz(static_cast<int>(high - low)) - 9);
        __syncthreads();
        buckets.count[range] = buckets.low[range] = buckets.high[range] = 0;
        __syncthreads();
        for_each_tile(block, edited, [&](int) {
            const RowWeights weigh = draw.weigh;
            const float best = draw.best;
            for_each_logit(block, [&](float x, int32_t) {
                const uint32_t key = ordered_bits(x);
                const uint32_t weight = key >= low && key <= high ? weigh.kept(x, best) : 0;
                if (weight > 0) {
                    const uint32_t at = (key - low) >> shift;
                    atomicAdd(buckets.count + at, 1u);
                    atomicAdd(buckets.low + at, weight & ((1u << kLowBits) - 1));
                    atomicAdd(buckets.high + at, weight >> kLowBits);
                }
            });
        });
        __syncthreads();
        const uint64_t count = buckets.count[range];
        const uint64_t mass = (uint64_t{buckets.high[range]} << kLowBits) + buckets.low[range];
        const uint64_t count_before = shared.reach.count + block.scan_before(count);
        __syncthreads();
        const uint64_t mass_before = shared.reach.mass + block.scan_before(mass);
        const bool here =
            !reached(count_before, mass_before) && reached(count_before + count, mass_before + mass);
        if (__syncthreads_or(here ? 1 : 0) == 0) {
            SampleReach found = shared.reach;
            found.count += block.reduce(count, Sum{});
            found.mass += block.reduce(mass, Sum{});
            return found;
        }
        if (here) {
            shared.reach = {true, low + (range << shift), count_before, mass_before, count};
        }
        __syncthreads();
        low = shared.reach.key;
        high = min(high, low + (1u << shift) - 1);
        if (shift == 0) {
            return shared.reach;
        }
        if (shared.reach.ties <= kSampleListMax) {
            if (threadIdx.x == 0) {
                shared.token_count = 0;
            }
            __syncthreads();
            for_each_tile(block, edited, [&](int number) {
#pragma unroll 1
                for (int32_t i = block.tile.lane; i < kSampleTile; i += kWarp) {
                    const float x = block.tile.x[i];
                    const uint32_t key = ordered_bits(x);
                    if (key >= low && key <= high && draw.weigh.kept(x, draw.best) > 0) {
                        list_token(shared, x, number * kSampleTile + i);
                    }
                }
            });
            __syncthreads();
            if (threadIdx.x < shared.token_count) {
                shared.weights[threadIdx.x] =
                    draw.weigh.kept(ranked_value(shared.list[threadIdx.x]), draw.best);
            }
            __syncthreads();
            reach_in_list(block, reached);
            return shared.reach;
        }
    }
}

__device__ inline SampleCut find_cut(SampleBlock& block, const SampleDraw& draw, bool edited) {
    const auto weight = [&](uint32_t key) {
        return uint64_t{draw.weigh.kept(from_ordered_bits(key), draw.best)};
    };
    SampleCut cut;
    double whole = draw.whole;
    if (whole <= 0) {
        const auto k = static_cast<uint64_t>(draw.top_k);
        const SampleReach last =
            reach(block, draw, edited, [k](uint64_t count, uint64_t) { return k > 0 && count >= k; });
        cut.key = last.any ? last.key : 0;
        whole = static_cast<double>(last.any ? last.mass + last.ties * weight(last.key) : last.mass);
    }
    if (block.slot().top_p >= 1) {
        return cut;
    }
    const double target = static_cast<double>(block.slot().top_p) * whole;
    const auto reached = [&](uint64_t mass) { return mass > 0 && static_cast<double>(mass) >= target; };
    const SampleReach last =
        reach(block, draw, edited, [&](uint64_t, uint64_t mass) { return reached(mass); });
    if (!last.any) {
        return cut;
    }
    uint64_t low = 1;
    uint64_t high = last.ties;
    while (low < high) {  // the fewest ties that reach the target
        const uint64_t middle = (low + high) / 2;
        if (reached(last.mass + middle * weight(last.key))) {
            high = middle;
        } else {
            low = middle + 1;
        }
    }
    return {last.key, low};
}

// The token of the block's tile that holds `point`, by one warp. `ties` of the tile are kept.
__device__ inline int32_t find_in_tile(const SampleTile& tile, const SampleDraw& draw, const SampleCut& cut,
                                       uint64_t ties, uint64_t point) {
    uint64_t before = 0;
    for (int32_t i = 0; i < kSampleTile; i += kWarp) {
        const float x = tile.x[i + tile.lane];
        const uint32_t key = ordered_bits(x);
        const uint32_t votes = __ballot_sync(kFullWarp, key == cut.key);
        const int earlier = __popc(votes & ((1u << tile.lane) - 1));
        const bool kept = key > cut.key || (key == cut.key && static_cast<uint64_t>(earlier) < ties);
        ties -= min(ties, static_cast<uint64_t>(__popc(votes)));
        const uint64_t sum =
            before + warp_scan(kept ? uint64_t{draw.weigh.kept(x, draw.best)} : 0, tile.lane);
        const uint32_t beyond = __ballot_sync(kFullWarp, sum > point);
        if (beyond != 0) {
            return i + __ffs(static_cast<int>(beyond)) - 1;
        }
        before = __shfl_sync(kFullWarp, sum, kWarp - 1);
    }
    return -1;
}

// Draws from all tokens that the cut keeps.
__device__ inline int32_t draw_by_cut(SampleBlock& block, const SampleDraw& draw, const SampleCut& cut,
                                      bool edited) {
    SampleShared& shared = block.shared;
    for_each_tile(block, edited, [&](int number) {
        const RowWeights weigh = draw.weigh;
        const float best = draw.best;
        const uint32_t least = cut.key;
        uint64_t above = 0;
        uint32_t ties = 0;
        for_each_logit(block, [&](float x, int32_t) {
            const uint32_t key = ordered_bits(x);
            above += key > least ? weigh.kept(x, best) : 0;
            ties += key == least ? 1 : 0;
        });
        const uint64_t all_above = warp_reduce(above, Sum{});
        const uint32_t all_ties = __reduce_add_sync(kFullWarp, ties);
        if (block.tile.lane == 0) {
            shared.tile_mass[number] = all_above;
            shared.tile_ties[number] = all_ties;
        }
    });
    __syncthreads();
    const auto t = static_cast<int>(threadIdx.x);
    const uint64_t one = draw.weigh.kept(from_ordered_bits(cut.key), draw.best);
    uint64_t ties = 0;
    uint64_t mass = 0;
    if (t < block.tiles) {
        uint64_t earlier = 0;
        for (int i = 0; i < t; ++i) {
            earlier += shared.tile_ties[i];
        }
        ties = min(shared.tile_ties[t], cut.ties - min(cut.ties, earlier));
        mass = shared.tile_mass[t] + ties * one;
    }
    __syncthreads();
    if (t < block.tiles) {
        shared.tile_mass[t] = mass;
    }
    const uint64_t total = block.reduce(mass, Sum{});
    const uint64_t point = __umul64hi(block.slot().fractions.whole, total);
    uint64_t before = 0;
    for (int i = 0; i < t && t < block.tiles; ++i) {
        before += shared.tile_mass[i];
    }
    if (before <= point && point < before + mass) {
        shared.found = t;
        shared.point = point - before;
        shared.ties = ties;
    }
    __syncthreads();
    if (block.warp() == 0) {
        bring_tile(block.tile, shared.found, edited);
        const int32_t place = find_in_tile(block.tile, draw, cut, shared.ties, shared.point);
        if (block.tile.lane == 0) {
            shared.token = shared.found * kSampleTile + place;
        }
    }
    __syncthreads();
    return shared.token;
}

__device__ inline int32_t draw_slowly(SampleBlock& block, const SampleDraw& draw, bool edited) {
    const SampleCut found = find_cut(block, draw, edited);
    __syncthreads();
    if (threadIdx.x == 0) {
        block.shared.cut = found;
    }
    __syncthreads();
    return draw_by_cut(block, draw, block.shared.cut, edited);
}

// Lists the `wanted` most probable tokens, sorted; how many there are. A pass for each key, and one for the
// ids that have it.
__device__ inline int32_t list_by_keys(SampleBlock& block, uint32_t largest, int32_t wanted) {
    SampleShared& shared = block.shared;
    SampleTile& tile = block.tile;
    int32_t count = 0;
    uint32_t key = largest;
    while (key > kSampleEmptyKey) {
        const float value = from_ordered_bits(key);
#pragma unroll 1
        for (int first = 0; first < block.tiles && count < wanted; first += kSampleWarps) {
            const int number = first + block.warp();
            uint32_t mine = 0;  // places that equal it: bit i of lane l is place 32 i + l
            if (number < block.tiles) {
                bring_tile(tile, number, false);
                for_each_logit(
                    block, [&](float x, int32_t place) { mine |= x == value ? 1u << (place / kWarp) : 0u; });
            }
            const uint64_t all = __reduce_add_sync(kFullWarp, static_cast<uint32_t>(__popc(mine)));
            int32_t at = count + static_cast<int32_t>(block.scan_before(tile.lane == 0 ? all : uint64_t{0}));
            at = __shfl_sync(kFullWarp, at, 0);
            __syncthreads();
#pragma unroll 1
            for (int i = 0; i < kWarp && at < wanted; ++i) {
                const uint32_t votes = __ballot_sync(kFullWarp, (mine >> i & 1) != 0);
                const int32_t place = at + __popc(votes & ((1u << tile.lane) - 1));
                if ((mine >> i & 1) != 0 && place < wanted) {
                    shared.tokens[place] =
                        ranked(value, static_cast<uint32_t>(number * kSampleTile + kWarp * i + tile.lane));
                }
                at += __popc(votes);
            }
            count += static_cast<int32_t>(block.reduce(tile.lane == 0 ? all : uint64_t{0}, Sum{}));
        }
        if (count >= wanted) {
            break;
        }
        uint32_t next = 0;
        for_each_tile(block, false, [&](int) {
            for_each_logit(block, [&](float x, int32_t) {
                const uint32_t other = ordered_bits(x);
                next = other < key ? max(next, other) : next;
            });
        });
        key = block.reduce(next, Max{});
    }
    __syncthreads();
    return min(count, wanted);
}

}  // namespace tessera::cuda

// A row finished by one thread block, once all of its tiles have been told of: the most probable tokens are
// looked for in the groups whose best tokens can be among them, which are read again from the level-2 cache.
#pragma once

#include "ops/common/cuda/async_copy.cuh"
#include "ops/sample/cuda/sample_tile.cuh"

namespace tessera::cuda {

inline constexpr int kSampleWarps = 16;
inline constexpr int kSampleThreads = kSampleWarps * kWarp;
inline constexpr int kSampleTilesMax = (kSampleCudaVocabMax + kSampleTile - 1) / kSampleTile;
// Up to this many best tokens are looked for in groups; a cut further down takes the slow way.
inline constexpr int kSampleBestMax = 256;
inline constexpr int kSampleNucleus = 64;  // best tokens in which top_p alone is tried
inline constexpr int kSampleListMax = kSampleThreads;

// Of ranges of logits, best first: how many tokens they hold, and their weights' sum in two parts.
struct SampleBuckets {
    uint32_t count[kSampleListMax];
    uint32_t low[kSampleListMax];  // of 13 bits each
    uint32_t high[kSampleListMax];
};

// The key at which the sums over the better tokens that have a weight reach a goal.
struct SampleReach {
    bool any = false;  // false: nowhere; the sums are those of all
    uint32_t key = 0;
    uint64_t count = 0;  // of the tokens above
    uint64_t mass = 0;
    uint64_t ties = 0;  // tokens at the key
};

// What draws are made with.
struct SampleDraw {
    RowWeights weigh;
    float best = 0;    // the row's largest logit
    double whole = 0;  // what top_p is a share of; 0: the mass of the list
    int32_t top_k = 0;
};

// What is kept: tokens with a key above `key`, and the first `ties` in order of ids of those that equal it.
struct SampleCut {
    uint32_t key = 0;
    uint64_t ties = ~uint64_t{0};
};

struct SampleShared {
    SampleCut cut;
    SampleRowSlot slot;  // as it was before this launch
    uint64_t reduce[kWarp];
    // Of the row that is being finished.
    union {
        uint4 told[kSampleTilesMax];  // of all tiles, where nothing is listed
        struct {
            union {
                uint64_t tokens[kSampleListMax];   // ranked(), best first
                uint32_t weights[kSampleListMax];  // of `list`
            };
            union {
                uint64_t list[kSampleListMax];  // ranked(), in any order
                uint64_t tile_ties[kSampleListMax];
            };
            union {
                uint64_t before[kSampleListMax];  // the sum of the weights of the tokens better than list's
                uint64_t tile_mass[kSampleListMax];
            };
        };
    };
    union {
        uint32_t groups[kSampleListMax];  // to be read again
        SampleBuckets buckets;
    };
    uint32_t group_count;
    uint32_t token_count;
    SampleReach reach;
    int32_t token;
    int32_t found;   // the number of what was looked for: a thread, a tile
    uint64_t point;  // and the sum before it, or the rest in it
    uint64_t ties;   // of the tile that are kept
    uint64_t least;  // ranked(): no token below it is kept
    SampleDraw draw;
    double log_sum;
};
static_assert(kSampleTilesMax <= kSampleListMax);

// What each thread of the block knows of the row.
struct SampleBlock {
    const SampleCudaArgs& args;
    SampleShared& shared;
    SampleTileWords* words = nullptr;  // of the row's tiles
    int tiles = 0;
    SampleTile tile;     // of this warp: memory for one
    bool marked = true;  // words come while the block reads them, and are cleared

    __device__ int warp() const { return static_cast<int>(threadIdx.x) / kWarp; }
    __device__ const SampleRowSlot& slot() const { return tile.slot; }
    // Of a tile's words, which have been asked for.
    __device__ __forceinline__ uint4 take(uint32_t* from, uint4 value, bool all) const {
        return marked ? take_words(from, value, all) : value;
    }
    template <typename T, typename Op>
    __device__ T reduce(T value, Op op) const {
        return block_reduce(value, op, T{0}, reinterpret_cast<T*>(shared.reduce));
    }
    // The sum of the values of the threads before this one. A barrier comes before the next use.
    __device__ uint64_t scan_before(uint64_t value) const {
        const uint64_t scan = warp_scan(value, tile.lane);
        if (tile.lane == kWarp - 1) {
            shared.reduce[warp()] = scan;
        }
        __syncthreads();
        const uint64_t others = tile.lane < warp() ? shared.reduce[tile.lane] : 0;
        return scan - value + warp_reduce(others, Sum{});
    }
};

// The keys of a row's groups, spread over the block's threads.
struct SampleGroupKeys {
    static constexpr int kQuads = (2 * kSampleTilesMax + kSampleThreads - 1) / kSampleThreads;
    uint4 quads[kQuads];
    uint32_t largest = 0;
    uint32_t smallest = 0;

    __device__ SampleGroupKeys(const SampleBlock& block, bool raw) {
        const auto at = [&](int i) {
            const int quad = static_cast<int>(threadIdx.x) + i * kSampleThreads;
            SampleTileWords& words = block.words[quad / 2];
            return (raw ? words.raw_groups : words.groups) + quad % 2 * 4;
        };
        const auto is_there = [&](int i) {
            return static_cast<int>(threadIdx.x) + i * kSampleThreads < 2 * block.tiles;
        };
#pragma unroll
        for (int i = 0; i < kQuads; ++i) {
            quads[i] = is_there(i) ? get_words(at(i)) : uint4{};
        }
        uint64_t range = 0;  // the largest key, and the largest of the complements
        const auto wider = [](uint64_t a, uint64_t b) {
            return max(a & ~uint64_t{0xFFFFFFFF}, b & ~uint64_t{0xFFFFFFFF}) |
                   max(static_cast<uint32_t>(a), static_cast<uint32_t>(b));
        };
#pragma unroll
        for (int i = 0; i < kQuads; ++i) {
            if (is_there(i)) {
                quads[i] = block.take(at(i), quads[i], true);
                const uint4& q = quads[i];
                const uint32_t high = max(max(q.x, q.y), max(q.z, q.w));
                const uint32_t low = min(min(q.x, q.y), min(q.z, q.w));
                range = wider(range, uint64_t{high} << 32 | ~low);
            }
        }
        range = block.reduce(range, wider);
        largest = static_cast<uint32_t>(range >> 32);
        smallest = ~static_cast<uint32_t>(range);
    }

    // f(key, group) for each of this thread's.
    template <typename F>
    __device__ __forceinline__ void for_each(F f) const {
#pragma unroll
        for (int i = 0; i < kQuads; ++i) {
            const uint32_t group = 4 * (threadIdx.x + i * kSampleThreads);
            f(quads[i].x, group);
            f(quads[i].y, group + 1);
            f(quads[i].z, group + 2);
            f(quads[i].w, group + 3);
        }
    }

    // A key that at least k groups reach, and not many more; one that every token reaches where there are no
    // k groups. At least k tokens are as large.
    __device__ uint32_t bound(const SampleBlock& block, uint32_t k) const {
        constexpr uint32_t kRanges = kSampleListMax;  // of keys, one each thread
        SampleShared& shared = block.shared;
        uint32_t* counts = shared.buckets.count;
        const uint32_t range = kRanges - 1 - threadIdx.x;  // the largest keys first
        uint32_t low = max(smallest, kSampleEmptyKey + 1);
        uint32_t high = max(largest, low);
        uint32_t above = 0;
        while (true) {
            const int shift = max(0, 32 - __clz(static_cast<int>(high - low)) - 9);
            counts[threadIdx.x] = 0;
            __syncthreads();
            for_each([&](uint32_t key, uint32_t) {
                if (key >= low && key <= high) {
                    atomicAdd(counts + ((key - low) >> shift), 1u);
                }
            });
            __syncthreads();
            const uint32_t mine = counts[range];
            const uint32_t before = above + static_cast<uint32_t>(block.scan_before(mine));
            const bool here = before < k && k <= before + mine;
            if (here) {
                shared.found = static_cast<int32_t>(range);
                shared.point = uint64_t{before + mine} << 32 | before;
            }
            if (__syncthreads_or(here ? 1 : 0) == 0) {
                return kSampleEmptyKey + 1;
            }
            low += static_cast<uint32_t>(shared.found) << shift;
            above = static_cast<uint32_t>(shared.point);
            if (shift == 0 || static_cast<uint32_t>(shared.point >> 32) <= k + k / 4 + 6) {
                return low;
            }
            high = min(high, low + (1u << shift) - 1);
        }
    }
};

// Brings the logits of the tile's first `count` groups from memory.
__device__ inline void load_groups(const SampleTile& tile, int count) {
    const float* logits = tile.args.logits + tile.row * tile.args.logits_stride;
    const auto vocab = static_cast<int32_t>(tile.args.vocab);
    const bool whole = tile.lane >= count || tile.first + kSampleGroup <= vocab;
    if (reinterpret_cast<uintptr_t>(logits) % 16 != 0 || __all_sync(kFullWarp, whole) == 0) {
#pragma unroll 1
        for (int i = tile.lane; i < count * kSampleGroup; i += kWarp) {
            const int32_t id = tile.first_of(i / kSampleGroup) + i % kSampleGroup;
            tile.x[i] = id < vocab ? logits[id] : minus_infinity();
        }
        __syncwarp();
        return;
    }
    const uint32_t to = shared_address(tile.x + 4 * tile.lane);
#pragma unroll 1
    for (int g = 0; g < count; ++g) {
        copy_async_16(to + static_cast<uint32_t>(g * kSampleGroup * 4),
                      logits + tile.first_of(g) + 4 * tile.lane);
    }
    copy_async_commit();
    copy_async_wait<0>();
    __syncwarp();
}

__device__ __forceinline__ void list_token(SampleShared& shared, float x, int32_t id) {
    const uint32_t place = atomicAdd(&shared.token_count, 1);
    if (place < kSampleListMax) {
        shared.list[place] = ranked(x, static_cast<uint32_t>(id));
    }
}

// Lists the tokens of the first `groups` of shared.groups that are as large as `least`. For the whole block.
__device__ inline void list_of_groups(SampleBlock& block, int groups, float least, bool edited) {
    SampleShared& shared = block.shared;
    SampleTile& tile = block.tile;
    const auto absent = static_cast<int32_t>((block.args.vocab + kSampleGroup - 1) / kSampleGroup);
    for (int at = block.warp(); at < groups; at += kSampleWarps * kSampleGroups) {
        const int mine = at + tile.lane % kSampleGroups * kSampleWarps;
        tile.first = (mine < groups ? static_cast<int32_t>(shared.groups[mine]) : absent) * kSampleGroup;
        const int count = min(kSampleGroups, (groups - at + kSampleWarps - 1) / kSampleWarps);
        const SampleSeen seen = edited ? load_seen(tile) : SampleSeen();
        load_groups(tile, count);
        if (edited) {
            edit_tile(tile, seen);
        }
        uint32_t hits = 0;  // groups in which one of the lane's four logits is large enough
#pragma unroll
        for (int g = 0; g < kSampleGroups; ++g) {
            if (g < count) {
                const float4 v = reinterpret_cast<const float4*>(tile.x)[g * kWarp + tile.lane];
                hits |= fmaxf(fmaxf(v.x, v.y), fmaxf(v.z, v.w)) >= least ? 1u << g : 0u;
            }
        }
        for (; hits != 0; hits &= hits - 1) {
            const int g = __ffs(static_cast<int>(hits)) - 1;
            const auto first = static_cast<int32_t>(shared.groups[at + g * kSampleWarps]) * kSampleGroup;
#pragma unroll 1
            for (int i = 4 * tile.lane; i < 4 * tile.lane + 4; ++i) {
                const float x = tile.x[g * kSampleGroup + i];
                if (x >= least) {
                    list_token(shared, x, first + i);
                }
            }
        }
        __syncwarp();
    }
    __syncthreads();
}

// Lists the tokens whose key reaches `bound`. False where there are too many. For the whole block.
__device__ inline bool list_tokens(SampleBlock& block, const SampleGroupKeys& keys, uint32_t bound,
                                   bool edited) {
    SampleShared& shared = block.shared;
    if (threadIdx.x == 0) {
        shared.group_count = 0;
        shared.token_count = 0;
    }
    __syncthreads();
    keys.for_each([&](uint32_t key, uint32_t group) {
        if (key >= bound) {
            const uint32_t place = atomicAdd(&shared.group_count, 1);
            if (place < kSampleListMax) {
                shared.groups[place] = group;
            }
        }
    });
    __syncthreads();
    const auto groups = static_cast<int>(shared.group_count);
    if (groups > kSampleListMax) {
        return false;
    }
    list_of_groups(block, groups, from_ordered_bits(bound), edited);
    return shared.token_count <= kSampleListMax;
}

// Orders the listed tokens: best first, at ties the lowest id. For the whole block.
__device__ inline void sort_tokens(const SampleBlock& block) {
    constexpr int kEach = 8;  // threads a token
    SampleShared& shared = block.shared;
    const auto count = static_cast<int>(shared.token_count);
    const int part = block.tile.lane % kEach;
    for (int c0 = block.warp() * (kWarp / kEach); c0 < count; c0 += kSampleThreads / kEach) {
        const int c = c0 + block.tile.lane / kEach;
        const uint64_t mine = shared.list[min(c, count - 1)];
        int better = 0;
#pragma unroll 4
        for (int j = part; j < count; j += kEach) {
            better += shared.list[j] > mine ? 1 : 0;
        }
        better = warp_reduce<kEach>(better, Sum{});
        if (c < count && part == 0) {
            shared.tokens[better] = mine;
        }
    }
    __syncthreads();
}

// Draws among the listed tokens. -1 when top_p reaches beyond them. For the whole block: eight threads a
// token go over all others, so that nothing need be sorted.
__device__ inline int32_t draw_from_list(const SampleBlock& block, const SampleDraw& draw) {
    constexpr int kEach = 8;
    SampleShared& shared = block.shared;
    const uint64_t* list = shared.list;
    const uint32_t* weights = shared.weights;
    const uint64_t* before = shared.before;
    const auto t = static_cast<int>(threadIdx.x);
    const auto count = static_cast<int>(shared.token_count);
    const int part = block.tile.lane % kEach;
    const int first = block.warp() * (kWarp / kEach);
    if (t < count) {
        shared.weights[t] = draw.weigh.kept(ranked_value(list[t]), draw.best);
    }
    if (t == 0) {
        shared.least = 0;
    }
    __syncthreads();
    for (int c0 = first; c0 < count; c0 += kSampleThreads / kEach) {
        const int c = c0 + block.tile.lane / kEach;
        const uint64_t mine = list[min(c, count - 1)];
        int better = 0;
        uint64_t mass = 0;
#pragma unroll 4
        for (int j = part; j < count; j += kEach) {
            const uint32_t weight = weights[j];  // read in any case: a branch costs more
            const bool is_better = list[j] > mine;
            better += is_better ? 1 : 0;
            mass += is_better ? weight : 0;
        }
        better = warp_reduce<kEach>(better, Sum{});
        mass = warp_reduce<kEach>(mass, Sum{});
        if (c < count && part == 0) {
            shared.before[c] = mass;
            if (better == draw.top_k - 1) {
                shared.least = mine & ~uint64_t{0xFFFFFFFF};  // it and what equals it
            }
        }
    }
    __syncthreads();
    const uint64_t least = shared.least;
    const auto sum_of = [&](auto is_in) {  // by each warp
        uint64_t sum = 0;
        for (int j = block.tile.lane; j < count; j += kWarp) {
            const uint32_t weight = weights[j];
            sum += is_in(j) ? weight : 0;
        }
        return warp_reduce(sum, Sum{});
    };
    uint64_t total = sum_of([&](int j) { return list[j] >= least; });
    const double top_p = static_cast<double>(block.slot().top_p);
    uint64_t target = ~uint64_t{0};
    if (top_p < 1) {
        // Sums are below 2^53: a sum is less than the product when it is less than the next integer.
        target =
            static_cast<uint64_t>(ceil(top_p * (draw.whole > 0 ? draw.whole : static_cast<double>(total))));
        if (draw.whole > 0 && total < target) {
            return -1;
        }
    }
    target = max(target, uint64_t{1});  // the best token is always kept
    const auto is_kept = [&](int j) {
        const uint64_t better = before[j];
        return (list[j] >= least) & (better < target);
    };
    total = sum_of(is_kept);
    // The running sum in order of ids.
    const uint64_t point = __umul64hi(block.slot().fractions.whole, total);
    for (int c0 = first; c0 < count; c0 += kSampleThreads / kEach) {
        const int c = min(c0 + block.tile.lane / kEach, count - 1);
        const auto id = static_cast<uint32_t>(list[c]);  // the larger, the lower the token's id
        uint64_t lower = 0;
#pragma unroll 4
        for (int j = part; j < count; j += kEach) {
            const uint32_t weight = weights[j];
            const bool is_lower = (static_cast<uint32_t>(list[j]) > id) & is_kept(j);
            lower += is_lower ? weight : 0;
        }
        lower = warp_reduce<kEach>(lower, Sum{});
        if (is_kept(c) && lower <= point && point < lower + weights[c]) {
            shared.token = ranked_index(list[c]);
        }
    }
    __syncthreads();
    return shared.token;
}

}  // namespace tessera::cuda

// The usual rows, finished by one thread block in as few steps as it takes: a row of which the tiles' best
// tokens tell all, by one warp, and the cut of a row that top_k or top_p leaves few of, by counting. What
// does not fit is left to sample_block.cuh.
#pragma once

#include "ops/sample/cuda/sample_report.cuh"

namespace tessera::cuda {

inline constexpr int kQuickTiles = kSampleThreads / 4;   // of a row: four threads each
inline constexpr int kQuickList = kSampleThreads / 4;    // listed tokens: four threads each
inline constexpr int kQuickGroups = kSampleThreads / 4;  // that are read again: eight a warp
static_assert(kQuickGroups == kSampleWarps * kSampleGroups);

// A listed token, in order of ids.
struct alignas(16) QuickPlace {
    uint32_t key;
    uint32_t weight;
    uint64_t before;  // the sum of the weights of the better ones
};

struct QuickShared {
    alignas(16) uint32_t tile_keys[kQuickTiles];  // the best of each, with the tile in the lowest bits
    uint32_t largest[kSampleWarps];
    uint64_t masses[kSampleWarps];
    uint32_t bound;
    uint32_t group_count;
    uint32_t token_count;
    uint32_t least;  // key: no token below it is kept
    uint32_t groups[kQuickGroups];
    alignas(16) uint64_t ranks[kQuickList];  // ranked(): the list
    uint32_t weights[kQuickList];
    uint32_t outputs[kQuickList];  // 32 bits of the tokens made, where the slot has penalties
    QuickPlace places[kQuickList];
    uint8_t numbers[kQuickList];  // where each of them is in the list
};

// What is listed of a row.
struct QuickList {
    bool raw = false;     // before the edits
    bool edited = false;  // what is read again has edits
    bool weighed = false;
    uint32_t largest = 0;  // key of the row's best
    float best = 0;
};

enum class QuickOutcome : uint8_t {
    kMine,   // this thread has the token, or the error
    kOther,  // another thread
    kMore,   // nothing has been decided
};

// The token of a row of up to kQuickTiles tiles whose best tokens tell all, by one warp, a lane four
// neighbours.
__device__ __forceinline__ QuickOutcome quick_tile(const SampleBlock& block, const SampleKind& kind,
                                                   Choice& choice) {
    constexpr int kEach = kQuickTiles / kWarp;
    const SampleTile& tile = block.tile;
    const int first = tile.lane * kEach;
    uint4 told[kEach];
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
        const int at = min(first + i, block.tiles - 1);
        told[i] = __ldcg(reinterpret_cast<const uint4*>(block.words[at].best));
    }
    choice.token = forced_token(tile.args, tile.slot, tile.slot.id);
    uint32_t key = 0;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
        key = max(key, told[i].x);
    }
    const uint32_t own = key;
    key = __reduce_max_sync(kFullWarp, key);
    if (key >= kSampleInfinityKey) {
        choice.error = SampleError::kNotFinite;
    } else if (choice.token < 0 && key == kSampleEmptyKey) {
        choice.error = SampleError::kNoToken;
    }
    if (choice.error != SampleError::kNone || choice.token >= 0) {
        return tile.lane == 0 ? QuickOutcome::kMine : QuickOutcome::kOther;
    }
    if (kind.greedy) {
        if (tile.lane != first_lane(own == key)) {
            return QuickOutcome::kOther;
        }
#pragma unroll
        for (int i = kEach - 1; i >= 0; --i) {
            if (told[i].x == key) {
                choice.token = (first + i) * kSampleTile + static_cast<int32_t>(told[i].y);
            }
        }
        return QuickOutcome::kMine;
    }
    const RowWeights& weigh = tile.slot.weigh;
    const float best = from_ordered_bits(key);
    uint64_t masses[kEach];
    uint64_t sum = 0;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
        const uint64_t tokens = uint64_t{told[i].w} << 32 | told[i].z;
        masses[i] = first + i < block.tiles ? weigh.tile_mass(tokens, from_ordered_bits(told[i].x), best) : 0;
        sum += masses[i];
    }
    const uint64_t scan = warp_scan(sum, tile.lane);
    const uint64_t point =
        __umul64hi(tile.slot.fractions.whole, __shfl_sync(kFullWarp, scan, kWarp - 1)) - (scan - sum);
    if (point >= sum) {
        return QuickOutcome::kOther;
    }
    uint64_t before = sum;
#pragma unroll
    for (int i = kEach - 1; i >= 0; --i) {
        before -= masses[i];
        if (before <= point && point - before < masses[i]) {
            choice.token = (first + i) * kSampleTile + static_cast<int32_t>(told[i].y);
        }
    }
    return QuickOutcome::kMine;
}

// Whether the k best tokens of a row can be looked for so.
__device__ __forceinline__ bool quick_takes(const SampleBlock& block, int k) {
    const SampleCudaArgs& args = block.args;
    return k <= block.tiles && block.tiles <= kQuickTiles && args.vocab % 4 == 0 &&
           args.logits_stride % 4 == 0 && reinterpret_cast<uintptr_t>(args.logits) % 16 == 0;
}

// Adds the warp's number to a count of the block, and returns what it was before.
__device__ __forceinline__ uint32_t quick_add(uint32_t& count, uint32_t number, int lane) {
    uint32_t before = 0;
    if (lane == 0) {  // what the compiler makes of atomicAdd() counts the lanes first
        asm volatile("atom.shared.add.u32 %0, [%1], %2;"
                     : "=r"(before)
                     : "r"(shared_address(&count)), "r"(number)
                     : "memory");
    }
    return __shfl_sync(kFullWarp, before, 0);
}

// Lists the warp's share of the tokens of quick.groups that reach `bound`.
__device__ __forceinline__ void quick_list_groups(const SampleBlock& block, QuickShared& quick,
                                                  const QuickList& list, uint32_t bound) {
    SampleTile tile = block.tile;
    const int lane = tile.lane;
    const SampleCudaArgs& args = tile.args;
    const float least = from_ordered_bits(bound);
    const auto vocab = static_cast<int32_t>(args.vocab);
    const auto groups = static_cast<int>(quick.group_count);
    const int mine = block.warp() + lane % kSampleGroups * kSampleWarps;
    tile.first = mine < groups ? static_cast<int32_t>(quick.groups[mine]) * kSampleGroup : vocab;
    const int count = (groups - block.warp() + kSampleWarps - 1) / kSampleWarps;
    const float* logits = args.logits + tile.row * args.logits_stride + 4 * lane;
#pragma unroll 1
    for (int g = 0; g < count; ++g) {
        const int32_t first = tile.first_of(g);
        float* to = tile.x + g * kSampleGroup + 4 * lane;
        if (first + 4 * lane < vocab) {
            copy_async_16(shared_address(to), logits + first);
        } else {
            *reinterpret_cast<float4*>(to) =
                make_float4(minus_infinity(), minus_infinity(), minus_infinity(), minus_infinity());
        }
    }
    copy_async_commit();
    const SampleSeen seen = list.edited ? load_seen(tile) : SampleSeen();
    copy_async_wait<0>();
    __syncwarp();
    if (list.edited) {
        edit_tile(tile, seen);
    }
    uint32_t hits = 0;  // four bits a group
#pragma unroll 2
    for (int g = 0; g < count; ++g) {
        const float4 v = reinterpret_cast<const float4*>(tile.x)[g * kWarp + lane];
        const uint32_t here = (v.x >= least ? 1u : 0u) | (v.y >= least ? 2u : 0u) | (v.z >= least ? 4u : 0u) |
                              (v.w >= least ? 8u : 0u);
        hits |= here << (4 * g);
    }
    // Of most lanes none is listed, of few one.
    const auto own = static_cast<uint32_t>(__popc(hits));
    uint32_t scan = own;
    const uint32_t some = __ballot_sync(kFullWarp, own > 0);
    uint32_t all = static_cast<uint32_t>(__popc(some));
    uint32_t place = static_cast<uint32_t>(__popc(some & ((1u << lane) - 1)));
    if (__any_sync(kFullWarp, own > 1)) {
        scan = warp_scan(own, lane);
        all = __shfl_sync(kFullWarp, scan, kWarp - 1);
        place = scan - own;
    }
    place += quick_add(quick.token_count, all, lane);
    const bool outputs = list.edited && tile.slot.has_penalties();
    while (hits != 0) {
        const int bit = __ffs(static_cast<int>(hits)) - 1;
        hits &= hits - 1;
        const int at = bit / 4 * kSampleGroup + 4 * lane + bit % 4;
        const int32_t id =
            static_cast<int32_t>(quick.groups[block.warp() + bit / 4 * kSampleWarps]) * kSampleGroup +
            4 * lane + bit % 4;
        if (place < kQuickList) {
            if (outputs) {
                const int64_t words = (args.vocab + 63) / 64 * 2;
                const auto* output = reinterpret_cast<const uint32_t*>(args.slots.output_seen);
                copy_async_4(shared_address(quick.outputs + place),
                             output + tile.slot.id * words + id / kWarp);
            }
            const float value = tile.x[at];
            quick.ranks[place] = ranked(value, static_cast<uint32_t>(id));
            quick.weights[place] = list.weighed ? tile.slot.weigh.kept(value, list.best) : 0;
        }
        ++place;
    }
    copy_async_commit();
}

// How a listed token stands to the others.
struct QuickOrder {
    int number = 0;
    uint64_t rank = 0;
    uint32_t lower = 0;   // tokens of lower ids
    uint32_t better = 0;  // better tokens
    uint64_t mass = 0;    // and their weights' sum
};
// Two tokens by eight threads, the first two of which have the answer: false for the others. By warps.
__device__ __forceinline__ bool quick_order(const QuickShared& quick, int count, QuickOrder& order) {
    const int part = static_cast<int>(threadIdx.x) % 8;
    const int first = static_cast<int>(threadIdx.x) / 8 * 2;
    const uint64_t a = quick.ranks[first];
    const uint64_t b = quick.ranks[first + 1];
    uint32_t numbers = 0;  // a byte each: of a the lower and the better ones, of b
    uint32_t sum_a = 0;    // of at most 16 weights
    uint32_t sum_b = 0;
#pragma unroll 2
    for (int j = part; j < count; j += 8) {
        const uint64_t other = quick.ranks[j];
        const uint32_t weight = quick.weights[j];
        numbers += static_cast<uint32_t>(other) > static_cast<uint32_t>(a) ? 1u : 0u;
        numbers += static_cast<uint32_t>(other) > static_cast<uint32_t>(b) ? 1u << 16 : 0u;
        if (other > a) {
            numbers += 1u << 8;
            sum_a += weight;
        }
        if (other > b) {
            numbers += 1u << 24;
            sum_b += weight;
        }
    }
    numbers += __shfl_xor_sync(kFullWarp, numbers, 1);
    sum_a += __shfl_xor_sync(kFullWarp, sum_a, 1);
    sum_b += __shfl_xor_sync(kFullWarp, sum_b, 1);
    // From here on an even thread goes on with a, an odd one with b.
    uint64_t mass = part % 2 == 0 ? sum_a : sum_b;
    numbers += __shfl_xor_sync(kFullWarp, numbers, 2);
    mass += __shfl_xor_sync(kFullWarp, mass, 2);
    numbers += __shfl_xor_sync(kFullWarp, numbers, 4);
    mass += __shfl_xor_sync(kFullWarp, mass, 4);
    numbers >>= 16 * (part % 2);
    order = {first + part, part % 2 == 0 ? a : b, numbers & 255, numbers >> 8 & 255, mass};
    return part < 2 && first + part < count;
}

// Draws among the ordered tokens, by one warp, a lane four neighbours. kMore, of all lanes, where top_p
// reaches beyond them. whole: what top_p is a share of; 0: the mass of the list.
__device__ __forceinline__ QuickOutcome quick_draw(const SampleBlock& block, const QuickShared& quick,
                                                   double whole, int count, Choice& choice) {
    constexpr int kEach = kQuickList / kWarp;
    const int lane = block.tile.lane;
    const uint32_t least = quick.least;
    uint32_t weights[kEach];
    uint64_t before[kEach];
    uint64_t own = 0;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
        const int at = kEach * lane + i;
        const QuickPlace place = quick.places[at];
        before[i] = place.before;
        weights[i] = at < count && place.key >= least ? place.weight : 0;
        own += weights[i];
    }
    const double top_p = static_cast<double>(block.slot().top_p);
    if (top_p < 1) {
        const uint64_t all = warp_sum(own);
        // Sums are below 2^53: a sum is less than the product when it is less than the next integer.
        auto target = static_cast<uint64_t>(ceil(top_p * (whole > 0 ? whole : static_cast<double>(all))));
        if (whole > 0 && all < target) {
            return QuickOutcome::kMore;
        }
        target = max(target, uint64_t{1});  // the best token is always kept
        own = 0;
#pragma unroll
        for (int i = 0; i < kEach; ++i) {
            weights[i] = before[i] < target ? weights[i] : 0;
            own += weights[i];
        }
    }
    const uint64_t scan = warp_scan(own, lane);
    const uint64_t point =
        __umul64hi(block.tile.slot.fractions.whole, __shfl_sync(kFullWarp, scan, kWarp - 1)) - (scan - own);
    if (point >= own) {
        return QuickOutcome::kOther;
    }
    uint64_t sum = 0;
    int at = kEach * lane;
#pragma unroll
    for (int i = 0; i + 1 < kEach; ++i) {
        sum += weights[i];
        at = point >= sum ? kEach * lane + i + 1 : at;
    }
    const int number = quick.numbers[at];
    choice.token = ranked_index(quick.ranks[number]);
    choice.made =
        (quick.outputs[number] >> choice.token % kWarp & 1) != 0 ? SampleMade::kBefore : SampleMade::kNever;
    return QuickOutcome::kMine;
}

// The bound is the key of the tile of which k - 1 are better: at least k tokens reach it. Four tiles by
// sixteen threads. By warps.
__device__ __forceinline__ void quick_bound(QuickShared& quick, int k) {
    const int part = static_cast<int>(threadIdx.x) % 16;
    const auto* all = reinterpret_cast<const uint4*>(quick.tile_keys);
    const uint4 own = all[threadIdx.x / 16];
    uint32_t numbers = 0;  // a byte each
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        const uint4 four = all[2 * part + i];
#pragma unroll
        for (const uint32_t other : {four.x, four.y, four.z, four.w}) {
            numbers += other > own.x ? 1u : 0u;
            numbers += other > own.y ? 1u << 8 : 0u;
            numbers += other > own.z ? 1u << 16 : 0u;
            numbers += other > own.w ? 1u << 24 : 0u;
        }
    }
#pragma unroll
    for (int offset = 1; offset < 16; offset *= 2) {
        numbers += __shfl_xor_sync(kFullWarp, numbers, offset);
    }
    if (part < 4 && static_cast<int>(numbers >> (8 * part) & 255) == k - 1) {
        const uint32_t key = part < 2 ? (part == 0 ? own.x : own.y) : (part == 2 ? own.z : own.w);
        quick.bound = key & ~static_cast<uint32_t>(kQuickTiles - 1);
    }
}

// Looks for the k best tokens. `between` is called once the row's largest key is known; a barrier follows.
// For the whole block; false: they are too many.
template <typename Between>
__device__ __forceinline__ bool quick_find(const SampleBlock& block, QuickShared& quick, QuickList& list,
                                           int k, Between between) {
    const int lane = block.tile.lane;
    const int warp = block.warp();
    const auto t = static_cast<int>(threadIdx.x);
    const int part = t % 4;
    const bool here = t / 4 < block.tiles;
    const SampleTileWords& words = block.words[here ? t / 4 : 0];
    uint2 keys = __ldcg(reinterpret_cast<const uint2*>(list.raw ? words.raw_groups : words.groups) + part);
    keys = here ? keys : uint2{};
    uint32_t mine = max(keys.x, keys.y);
    mine = max(mine, __shfl_xor_sync(kFullWarp, mine, 1));
    mine = max(mine, __shfl_xor_sync(kFullWarp, mine, 2));
    const uint32_t largest_here = __reduce_max_sync(kFullWarp, mine);
    constexpr uint32_t kLow = kQuickTiles - 1;
    mine = (mine & ~kLow) | (kLow - static_cast<uint32_t>(t) / 4);  // no two are equal
    if (part == 0) {
        quick.tile_keys[t / 4] = mine;
    }
    if (lane == 0) {
        quick.largest[warp] = largest_here;
    }
    if (t == 0) {
        quick.group_count = 0;
        quick.token_count = 0;
        quick.least = 0;
    }
    __syncthreads();
    // The tile of which k - 1 are better has the bound: k tokens at least reach it.
    const uint32_t largest = __reduce_max_sync(kFullWarp, quick.largest[lane % kSampleWarps]);
    if (warp * (kWarp / 4) < block.tiles) {
        quick_bound(quick, k);
    }
    list.largest = largest;
    list.best = from_ordered_bits(largest);
    between(largest);
    __syncthreads();
    if (largest >= kSampleInfinityKey || largest == kSampleEmptyKey) {
        return true;
    }
    uint32_t bound = max(quick.bound, kSampleEmptyKey + 1);
    const RowWeights& weigh = block.tile.slot.weigh;
    const float min_p = block.slot().min_p;
    if (list.weighed && min_p > 0) {
        const float least = weigh.least_logit(list.best, min_p);
        bound = least > minus_infinity() ? max(bound, ordered_bits(least)) : bound;
    }
    const uint32_t first = __ballot_sync(kFullWarp, keys.x >= bound);
    const uint32_t second = __ballot_sync(kFullWarp, keys.y >= bound);
    const uint32_t before = (1u << lane) - 1;
    uint32_t at = quick_add(quick.group_count, static_cast<uint32_t>(__popc(first) + __popc(second)), lane) +
                  static_cast<uint32_t>(__popc(first & before) + __popc(second & before));
    if (keys.x >= bound && at < kQuickGroups) {
        quick.groups[at++] = 2 * static_cast<uint32_t>(t);
    }
    if (keys.y >= bound && at < kQuickGroups) {
        quick.groups[at] = 2 * static_cast<uint32_t>(t) + 1;
    }
    __syncthreads();
    if (quick.group_count > kQuickGroups) {
        return false;
    }
    quick_list_groups(block, quick, list, bound);
    __syncthreads();
    return quick.token_count <= kQuickList;
}

// Draws from what top_k, min_p and top_p leave. For the whole block; kMore is the answer of all threads.
__device__ inline QuickOutcome quick_cut(const SampleBlock& block, QuickShared& quick, const SampleKind& kind,
                                         Choice& choice) {
    const int warp = block.warp();
    const auto t = static_cast<int>(threadIdx.x);
    QuickList list;
    list.edited = kind.edited;
    list.weighed = true;
    uint4 told{kSampleEmptyKey, 0, 0, 0};
    if (kind.by_tiles && t < block.tiles) {
        told = __ldcg(reinterpret_cast<const uint4*>(block.words[t].best));
    }
    const int k = kind.top_k > 0 ? kind.top_k : kSampleNucleus;
    const bool fits = quick_find(block, quick, list, k, [&](uint32_t largest) {
        if (kind.by_tiles) {
            uint64_t mass = 0;
            if (t < block.tiles && largest < kSampleInfinityKey) {
                const uint64_t tokens = uint64_t{told.w} << 32 | told.z;
                mass = block.tile.slot.weigh.tile_mass(tokens, from_ordered_bits(told.x),
                                                       from_ordered_bits(largest));
            }
            mass = warp_reduce(mass, Sum{});
            if (block.tile.lane == 0) {
                quick.masses[warp] = mass;
            }
        }
    });
    if (list.largest >= kSampleInfinityKey || list.largest == kSampleEmptyKey) {
        choice.error = list.largest == kSampleEmptyKey ? SampleError::kNoToken : SampleError::kNotFinite;
        return t == 0 ? QuickOutcome::kMine : QuickOutcome::kOther;
    }
    if (!fits) {
        return QuickOutcome::kMore;
    }
    const auto count = static_cast<int>(quick.token_count);
    if (QuickOrder order; warp * (kWarp / 4) < count && quick_order(quick, count, order)) {
        const auto key = static_cast<uint32_t>(order.rank >> 32);
        quick.places[order.lower] = {key, quick.weights[order.number], order.mass};
        quick.numbers[order.lower] = static_cast<uint8_t>(order.number);
        if (static_cast<int>(order.better) == kind.top_k - 1) {
            quick.least = key;
        }
    }
    copy_async_wait<0>();
    __syncthreads();
    if (!kind.by_tiles) {
        return warp == 0 ? quick_draw(block, quick, 0, count, choice) : QuickOutcome::kOther;
    }
    // By every warp, so that all know whether the list was too short.
    uint64_t mass = 0;
#pragma unroll
    for (int w = 0; w < kSampleWarps; ++w) {
        mass += quick.masses[w];
    }
    const double whole = static_cast<double>(mass) / (1 << SampleWeightConstants::kTileBits);
    const QuickOutcome outcome = quick_draw(block, quick, whole, count, choice);
    return outcome == QuickOutcome::kMine && warp != 0 ? QuickOutcome::kOther : outcome;
}

// The most probable tokens into the result, where they fit: as report_top(). For the whole block; false:
// nothing has been reported.
__device__ inline bool quick_report(const SampleBlock& block, QuickShared& quick, double& log_sum) {
    const auto t = static_cast<int>(threadIdx.x);
    const int top = min(block.slot().top, kSampleTopMax);
    SampleRowResult& result = block.args.results[block.tile.row];
    QuickList list;
    list.raw = true;
    uint4 told{kSampleEmptyKey, 0, 0, 0};
    if (t < block.tiles) {
        told = get_words(block.words[t].raw);
    }
    const bool fits = quick_find(block, quick, list, top,
                                 [&](uint32_t largest) { log_sum = sum_of_tiles(block, told, largest); });
    if (!fits || list.largest >= kSampleInfinityKey || list.largest == kSampleEmptyKey) {
        return false;
    }
    const auto count = static_cast<int>(quick.token_count);
    if (QuickOrder order; block.warp() * (kWarp / 4) < count && quick_order(quick, count, order)) {
        if (static_cast<int>(order.better) < top) {
            const double logit = static_cast<double>(ranked_value(order.rank));
            result.top[static_cast<size_t>(order.better)] = {ranked_index(order.rank),
                                                             static_cast<float>(logit - log_sum)};
        }
    }
    if (t == 0) {
        result.top_count = min(top, count);
    }
    return true;
}

}  // namespace tessera::cuda

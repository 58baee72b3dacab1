// Few rows: each is shared by as many blocks as the device has for it, which hold its logits in registers and
// tell of the best tokens of each group of 128; the row's last block finishes it from these. See README.md.
#include <algorithm>

#include "device/cuda/cuda_check.h"
#include "ops/common/cuda/dependent_launch.cuh"
#include "ops/sample/cuda/sample_few.cuh"
#include "ops/sample/cuda/sample_few.h"

namespace tessera {
namespace {

using namespace cuda;

constexpr int kSharedBytes =
    kSampleWarps * kSampleTile * 4 + static_cast<int>(sizeof(FewShared));  // a tile a warp for the slow way

// A row that a block finishes.
struct FewBlock : SampleBlock {
    FewShared& few;
    const FewSpan& span;
    FewWord* group_words = nullptr;  // what the row's blocks tell beside `words`
};

// The words of a row's groups, two neighbours a thread.
struct FewGroups {
    FewWord words[kFewWords];

    __device__ static int group(int i) { return static_cast<int>(threadIdx.x) * kFewWords + i; }

    __device__ FewGroups(FewWord* from, int groups) {
#pragma unroll
        for (int i = 0; i < kFewWords; ++i) {
            words[i] =
                group(i) < groups ? get_words(reinterpret_cast<uint32_t*>(from + group(i))) : FewWord{};
        }
#pragma unroll
        for (int i = 0; i < kFewWords; ++i) {
            if (group(i) < groups) {
                words[i] = take_words(reinterpret_cast<uint32_t*>(from + group(i)), words[i], false);
            }
        }
    }
};

enum class FewOutcome : uint8_t { kOther, kMine, kMore };

// The row's best token from its blocks' words. By one warp.
__device__ FewOutcome choose_best(const FewBlock& block, Choice& choice) {
    constexpr int kAtOnce = kFewRowTiles / kWarp;
    const SampleTile& tile = block.tile;
    SampleTileWords* const words = block.words;
    choice.token = forced_token(tile.args, tile.slot, tile.slot.id);
    uint4 told[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
        const int at = (tile.lane + i * kWarp) * block.span.each;
        told[i] = at < block.tiles ? get_words(words[at].best) : uint4{};
    }
    uint32_t key = 0;
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
        const int at = (tile.lane + i * kWarp) * block.span.each;
        if (at < block.tiles) {
            told[i] = take_words(words[at].best, told[i], false);
        }
        key = max(key, told[i].x);
    }
    key = __reduce_max_sync(kFullWarp, key);
    uint32_t low = 0;
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
        low = max(low, told[i].x == key ? told[i].y : 0u);
    }
    const uint32_t found = 0xFFFFFFFFu - __reduce_max_sync(kFullWarp, low);
    if (key >= kSampleInfinityKey) {
        choice.error = SampleError::kNotFinite;
    } else if (choice.token < 0) {
        choice.error = key == kSampleEmptyKey ? SampleError::kNoToken : SampleError::kNone;
        choice.token = static_cast<int32_t>(found >> 1);
        choice.made = (found & 1) != 0 ? SampleMade::kBefore : SampleMade::kNever;
    }
    return tile.lane == 0 ? FewOutcome::kMine : FewOutcome::kOther;
}

// A key that at least k of the groups' best reach, and not many more. As SampleGroupKeys::bound().
// smallest, largest: of these.
__device__ uint32_t bound_of_groups(const FewBlock& block, const FewGroups& groups, uint32_t smallest,
                                    uint32_t largest, uint32_t k) {
    FewShared& few = block.few;
    uint32_t low = max(smallest, kSampleEmptyKey + 1);
    uint32_t high = max(largest, low);
    constexpr int kEach = kFewRanges / kWarp;  // ranges a lane adds
    uint32_t above = 0;
    while (true) {
        const int shift = max(0, 32 - __clz(static_cast<int>(high - low)) - 10);
        few.counts[threadIdx.x] = 0;
        __syncthreads();
#pragma unroll
        for (int i = 0; i < kFewWords; ++i) {
            const uint32_t key = groups.words[i].z;
            if (key >= low && key <= high) {
                const uint32_t range = (key - low) >> shift;
                atomicAdd(few.counts + range / 2, 1u << (16 * (range % 2)));
            }
        }
        __syncthreads();
        // Each warp on its own: lane 0 has the largest keys.
        const int lane = block.tile.lane;
        const auto* quads = reinterpret_cast<const uint4*>(few.counts) + (kWarp - 1 - lane) * (kEach / 8);
        uint32_t sum = 0;
#pragma unroll
        for (int i = 0; i < kEach / 8; ++i) {
            const uint4 quad = quads[(i + lane) % (kEach / 8)];
            sum += quad.x + quad.y + quad.z + quad.w;
        }
        sum = (sum & 0xFFFF) + (sum >> 16);
        const uint32_t scan = warp_scan(sum, lane);
        const int owner = first_lane(above + scan >= k);
        if (owner < 0) {
            return kSampleEmptyKey + 1;
        }
        const uint32_t before = above + __shfl_sync(kFullWarp, scan - sum, owner);
        const int range = (kWarp - owner) * kEach - 1 - lane;
        static_assert(kEach == kWarp);
        const uint32_t mine = few.counts[range / 2] >> (16 * (range % 2)) & 0xFFFF;
        const uint32_t fine = before + warp_scan(mine, lane);
        const int at = first_lane(fine >= k);
        const uint32_t with = __shfl_sync(kFullWarp, fine, at);
        above = with - __shfl_sync(kFullWarp, mine, at);
        low += static_cast<uint32_t>((kWarp - owner) * kEach - 1 - at) << shift;
        if (shift == 0 || with <= k + k / 4 + 6) {
            return low;
        }
        high = min(high, low + (1u << shift) - 1);
        __syncthreads();
    }
}

struct FewDraw : SampleDraw {
    uint64_t fraction = 0;
    uint32_t bound = 0;  // key that the listed tokens reach
};

// draw_from_list() of up to kFewList tokens that have their weights. For the whole block; kMore where more is
// needed.
__device__ FewOutcome draw_from_few(const FewBlock& block, const FewDraw& draw, Choice& choice) {
    FewShared& few = block.few;
    constexpr int kMine = kFewList / kWarp;  // tokens of a lane
    constexpr int kAtOnce = 4;               // that a warp ranks
    SampleShared& shared = block.shared;
    const int lane = block.tile.lane;
    const int count = static_cast<int>(shared.token_count);
    uint64_t list[kMine];
    uint32_t weights[kMine];
#pragma unroll
    for (int i = 0; i < kMine; ++i) {
        list[i] = shared.list[lane + i * kWarp];
        weights[i] = shared.weights[lane + i * kWarp];
    }
#pragma unroll 1
    for (int c0 = block.warp(); c0 < count; c0 += kAtOnce * kSampleWarps) {
        uint64_t mine[kAtOnce];
        uint32_t counts[kAtOnce];  // better tokens, and from bit 16 on those of lower ids
        uint32_t mass[kAtOnce];    // of the better ones; right where there are fewer than kFewSums
#pragma unroll
        for (int n = 0; n < kAtOnce; ++n) {
            mine[n] = shared.list[c0 + n * kSampleWarps];
            counts[n] = 0;
            mass[n] = 0;
#pragma unroll
            for (int i = 0; i < kMine; ++i) {
                const bool better = list[i] > mine[n];
                const bool lower = static_cast<uint32_t>(list[i]) > static_cast<uint32_t>(mine[n]);
                counts[n] += (better ? 1u : 0u) + (lower ? 0x10000u : 0u);
                mass[n] += better ? weights[i] : 0;
            }
        }
#pragma unroll
        for (int n = 0; n < kAtOnce; ++n) {
            counts[n] = __reduce_add_sync(kFullWarp, counts[n]);
            mass[n] = __reduce_add_sync(kFullWarp, mass[n]);
        }
        const int c = c0 + lane * kSampleWarps;
        if (lane < kAtOnce && c < count) {
            const uint64_t own = lane < 2 ? (lane == 0 ? mine[0] : mine[1]) : (lane == 2 ? mine[2] : mine[3]);
            const uint32_t ranks =
                lane < 2 ? (lane == 0 ? counts[0] : counts[1]) : (lane == 2 ? counts[2] : counts[3]);
            const uint32_t sum = lane < 2 ? (lane == 0 ? mass[0] : mass[1]) : (lane == 2 ? mass[2] : mass[3]);
            const auto key = static_cast<uint32_t>(own >> 32);
            few.ordered[ranks >> 16] = {
                key, shared.weights[c], sum,
                static_cast<uint32_t>(ranked_index(own)) | (few.made[c] ? kFewMade : 0u)};
            if (static_cast<int32_t>(ranks & 0xFFFF) == draw.top_k - 1) {
                few.least = key;
            }
        }
    }
    __syncthreads();
    const bool all = draw.whole > 0 || count >= kFewSums;  // whether more is needed, all warps must know
    if (block.warp() != 0 && !all) {
        return FewOutcome::kOther;
    }
    const uint32_t least = few.least;
    uint4 token[kMine];
    uint32_t weight[kMine];
    uint32_t sum = 0;
    uint32_t kept = 0;
#pragma unroll
    for (int i = 0; i < kMine; ++i) {
        token[i] = kMine * lane + i < count ? few.ordered[kMine * lane + i] : uint4{};
        const bool in = token[i].x >= least && token[i].x > 0;
        weight[i] = in ? token[i].y : 0;
        kept += in ? 1 : 0;
        sum += weight[i];
    }
    if (all && __reduce_add_sync(kFullWarp, kept) >= kFewSums) {
        return FewOutcome::kMore;
    }
    const double top_p = static_cast<double>(block.slot().top_p);
    if (top_p < 1) {
        const uint32_t total = __reduce_add_sync(kFullWarp, sum);
        const double whole = draw.whole > 0 ? draw.whole : static_cast<double>(total);
        const double target = ceil(top_p * whole);
        if (draw.whole > 0 && static_cast<double>(total) < target) {
            return FewOutcome::kMore;
        }
        // No more than the total where the whole is the list's; else it is reached.
        const auto goal = static_cast<uint32_t>(fmax(target, 1.0));
        sum = 0;
#pragma unroll
        for (int i = 0; i < kMine; ++i) {
            weight[i] = token[i].z < goal ? weight[i] : 0;
            sum += weight[i];
        }
    }
    if (block.warp() != 0) {
        return FewOutcome::kOther;
    }
    const uint32_t scan = warp_scan(sum, lane);
    const auto point =
        static_cast<uint32_t>(__umul64hi(draw.fraction, __shfl_sync(kFullWarp, scan, kWarp - 1)));
    const int owner = first_lane(scan > point);
    uint32_t before = scan;
    uint32_t found = 0;
#pragma unroll
    for (int i = kMine - 1; i >= 0; --i) {
        before -= weight[i];
        found = point < before + weight[i] ? token[i].w : found;
    }
    choice.token = static_cast<int32_t>(found & ~kFewMade);
    choice.made = (found & kFewMade) != 0 ? SampleMade::kBefore : SampleMade::kNever;
    return lane == owner ? FewOutcome::kMine : FewOutcome::kOther;
}

// A token into the list. id: with kFewMade.
__device__ __forceinline__ void list_weighed(const FewBlock& block, const FewDraw& draw, uint32_t key,
                                             uint32_t id) {
    SampleShared& shared = block.shared;
    const uint32_t place = atomicAdd(&shared.token_count, 1);
    const float x = from_ordered_bits(key);
    if (place < kSampleListMax) {
        shared.list[place] = ranked(x, id & ~kFewMade);
    }
    if (place < kFewList) {
        shared.weights[place] = draw.weigh.kept(x, draw.best);
        block.few.made[place] = (id & kFewMade) != 0;
    }
}

__device__ __forceinline__ uint32_t least_key_of(const SampleSlot& slot, const FewDraw& draw) {
    if (slot.min_p <= 0) {
        return 0;
    }
    const float least = draw.weigh.least_logit(draw.best, slot.min_p);
    return least > minus_infinity() ? ordered_bits(least) : 0;
}

__device__ __forceinline__ void empty_list(FewShared& few) {
    SampleShared& shared = few.sample;
    const auto t = static_cast<int>(threadIdx.x);
    if (t < kFewList) {
        shared.list[t] = 0;
    }
    if (t == 0) {
        shared.token_count = 0;
        shared.group_count = 0;
        few.least = 0;
    }
}

// Whether a row's blocks list their best tokens: where few are kept, the k-th of the tiles' bests, or one
// somewhat above, is a bound that not many more tokens reach.
__device__ __forceinline__ bool has_lists(const SampleKind& kind, const FewSpan& span) {
    return kind.cut && kind.top_k > 0 && 2 * kind.top_k <= span.tiles;
}

constexpr uint32_t kTileMask = kFewRowTiles - 1;

// Sets few.bound to the tile's best that is the wanted-th. Each warp looks for the ranks of some.
__device__ __forceinline__ void rank_tiles(FewShared& few, uint32_t wanted) {
    constexpr int kEach = kFewRowTiles / kSampleWarps;
    static_assert(kFewRowTiles == 4 * kWarp && kEach % 4 == 0);
    const auto* quads = reinterpret_cast<const uint4*>(few.places);
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
    const int warp = static_cast<int>(threadIdx.x) / kWarp;
    const uint4 all = quads[lane];
    const auto better = [&](uint32_t key) {
        return (all.x > key ? 1u : 0u) + (all.y > key ? 1u : 0u) + (all.z > key ? 1u : 0u) +
               (all.w > key ? 1u : 0u);
    };
    uint4 mine[kEach / 4];
    uint32_t ranks[kEach / 2];  // of two each
#pragma unroll
    for (int i = 0; i < kEach / 4; ++i) {
        mine[i] = quads[warp * (kEach / 4) + i];
        ranks[2 * i] = better(mine[i].x) | better(mine[i].y) << 16;
        ranks[2 * i + 1] = better(mine[i].z) | better(mine[i].w) << 16;
    }
#pragma unroll
    for (int i = 0; i < kEach / 2; ++i) {
        ranks[i] = __reduce_add_sync(kFullWarp, ranks[i]);
    }
    uint32_t key = 0;
#pragma unroll
    for (int i = 0; i < kEach / 4; ++i) {
        key = (ranks[2 * i] & 0xFFFF) == wanted - 1 ? mine[i].x : key;
        key = ranks[2 * i] >> 16 == wanted - 1 ? mine[i].y : key;
        key = (ranks[2 * i + 1] & 0xFFFF) == wanted - 1 ? mine[i].z : key;
        key = ranks[2 * i + 1] >> 16 == wanted - 1 ? mine[i].w : key;
    }
    if (key != 0 && lane == 0) {
        few.bound = max(key & ~kTileMask, kSampleEmptyKey + 1);
    }
}

// Draws from what top_k, min_p and top_p leave, where has_lists(). As choose_few().
__device__ FewOutcome choose_listed(const FewBlock& block, FewDraw& draw, Choice& choice) {
    SampleShared& shared = block.shared;
    FewShared& few = block.few;
    const FewSpan& span = block.span;
    FewWord* const words = block.group_words;
    const int lane = block.tile.lane;
    const auto t = static_cast<int>(threadIdx.x);
    const int pairs = (span.tiles + span.each - 1) / span.each * span.slots / 2;
    const auto k = static_cast<uint32_t>(draw.top_k);
    empty_list(few);
    if (t < kFewRowTiles) {
        few.places[t] = kTileMask - static_cast<uint32_t>(t);
        few.incomplete[t] = false;
    }
    const float spared = __fdividef(0.16f * static_cast<float>(k * k), static_cast<float>(span.tiles));
    uint32_t wanted = k - static_cast<uint32_t>(spared);
    __syncthreads();
    FewWord pair[kFewWords];
#pragma unroll
    for (int i = 0; i < kFewWords; ++i) {
        const int at = t + i * kSampleThreads;
        pair[i] = at < pairs ? get_words(reinterpret_cast<uint32_t*>(words + at)) : FewWord{1, 0, 1, 0};
    }
    uint32_t largest = 0;
#pragma unroll
    for (int i = 0; i < kFewWords; ++i) {
        const int at = t + i * kSampleThreads;
        if (at < pairs) {
            auto* const from = reinterpret_cast<uint32_t*>(words + at);
            while (pair[i].x == 0 || pair[i].z == 0) {
                pair[i] = get_words(from);
            }
            put_words(from, 0, 0, 0);
        }
        const auto note = [&](uint32_t key, uint32_t id) {
            if (key > kSampleEmptyKey && (id & kFewRest) == 0) {
                const uint32_t tile = (id & ~kFewMade) / kSampleTile;
                atomicMax(few.places + tile, (key & ~kTileMask) | (kTileMask - tile));
            }
            largest = max(largest, key);
        };
        note(pair[i].x, pair[i].y);
        note(pair[i].z, pair[i].w);
    }
    largest = __reduce_max_sync(kFullWarp, largest);
    if (lane == 0) {
        few.largest[block.warp()] = largest;
    }
    __syncthreads();
    largest = __reduce_max_sync(kFullWarp, few.largest[lane % kSampleWarps]);
    if (largest >= kSampleInfinityKey || largest <= kSampleEmptyKey) {
        choice.error = largest >= kSampleInfinityKey ? SampleError::kNotFinite : SampleError::kNoToken;
        return t == 0 ? FewOutcome::kMine : FewOutcome::kOther;
    }
    draw.best = from_ordered_bits(largest);
    const uint32_t least_key = least_key_of(block.slot(), draw);
#pragma unroll 1
    for (bool again = false;;) {
        rank_tiles(few, wanted);
        __syncthreads();
        draw.bound = max(few.bound, least_key);
        uint32_t tokens = 0;
#pragma unroll
        for (int i = 0; i < kFewWords; ++i) {
            tokens |= (pair[i].x >= draw.bound ? 1u : 0u) << (2 * i);
            tokens |= (pair[i].z >= draw.bound ? 2u : 0u) << (2 * i);
        }
#pragma unroll 1
        for (; tokens != 0; tokens &= tokens - 1) {
            const int i = __ffs(static_cast<int>(tokens)) - 1;
            const FewWord a = pair[0];
            const FewWord b = pair[1];
            const uint32_t even_key = i < 2 ? a.x : b.x;
            const uint32_t odd_key = i < 2 ? a.z : b.z;
            const uint32_t even_id = i < 2 ? a.y : b.y;
            const uint32_t odd_id = i < 2 ? a.w : b.w;
            const uint32_t key = i % 2 == 0 ? even_key : odd_key;
            const uint32_t id = i % 2 == 0 ? even_id : odd_id;
            if ((id & kFewRest) == 0 && !again) {
                list_weighed(block, draw, key, id);
                continue;
            }
            const int part = (t + i / 2 * kSampleThreads) / (span.slots / 2);
            if ((id & kFewRest) == 0) {
                if (!few.incomplete[part]) {
                    list_weighed(block, draw, key, id);
                }
            } else if (!again) {
                few.incomplete[part] = true;
                atomicAdd(&shared.group_count, 1);
            } else {
                const int first = part * span.each;
                const int end = min(first + span.each, span.tiles) * kSampleGroups;
                for (int g = first * kSampleGroups; g < end; ++g) {
                    shared.groups[atomicAdd(&shared.group_count, 1) % kSampleListMax] =
                        static_cast<uint32_t>(g);
                }
            }
        }
        __syncthreads();
        if (again) {
            return FewOutcome::kMore;
        }
        const bool more = shared.group_count > 0;
        const bool enough = wanted == k || shared.token_count >= k || draw.bound == least_key;
        if (!more && enough) {
            break;
        }
        again = more && wanted == k;
        wanted = k;
        __syncthreads();
        if (t == 0) {
            shared.token_count = 0;
            shared.group_count = 0;
        }
        __syncthreads();
    }
    return shared.token_count > kFewList ? FewOutcome::kMore : draw_from_few(block, draw, choice);
}

// Lists the tokens that reach the bound, and the groups that may have more of them than they tell of.
__device__ __forceinline__ void list_few(const FewBlock& block, const FewGroups& groups,
                                         const FewDraw& draw) {
    SampleShared& shared = block.shared;
    uint32_t tokens = 0;  // bit 2 i: the best of word i, bit 2 i + 1: its second
#pragma unroll
    for (int i = 0; i < kFewWords; ++i) {
        const FewWord& word = groups.words[i];
        if (word.x >= draw.bound) {
            shared.groups[atomicAdd(&shared.group_count, 1) % kSampleListMax] =
                static_cast<uint32_t>(FewGroups::group(i));
        } else {
            tokens |= (word.z >= draw.bound ? 1u : 0u) << (2 * i) | (word.y >= draw.bound ? 2u : 0u)
                                                                        << (2 * i);
        }
    }
#pragma unroll 1
    for (; tokens != 0; tokens &= tokens - 1) {
        const int i = __ffs(static_cast<int>(tokens)) - 1;
        const FewWord a = groups.words[0];
        const FewWord b = groups.words[1];
        const uint32_t even = i == 0 ? a.z : b.z;
        const uint32_t odd = i == 1 ? a.y : b.y;
        const uint32_t at = (i < 2 ? a.w : b.w) >> (i % 2 == 0 ? 16 : 8);
        list_weighed(block, draw, i % 2 == 0 ? even : odd,
                     (static_cast<uint32_t>(FewGroups::group(i / 2) * kSampleGroup) + (at & 127)) |
                         ((at & 128) != 0 ? kFewMade : 0u));
    }
}

// Draws from what top_k, min_p and top_p leave. For the whole block; kMine in the one thread that has the
// choice, kMore where choose_more() goes on.
__device__ FewOutcome choose_few(const FewBlock& block, const SampleKind& kind, FewDraw& draw,
                                 Choice& choice) {
    SampleShared& shared = block.shared;
    FewShared& few = block.few;
    const int lane = block.tile.lane;
    const auto t = static_cast<int>(threadIdx.x);
    empty_list(few);
    const FewGroups groups(block.group_words, block.tiles * kSampleGroups);
    const bool tells = kind.by_tiles && t < block.tiles;
    uint4 told{};
    if (tells) {
        uint32_t* from = block.words[t].best;
        told = take_words(from, get_words(from), false);
    }
    const bool here = FewGroups::group(0) < block.tiles * kSampleGroups;
    uint32_t largest = __reduce_max_sync(kFullWarp, max(groups.words[0].z, groups.words[1].z));
    uint32_t smallest =
        __reduce_min_sync(kFullWarp, here ? min(groups.words[0].z, groups.words[1].z) : 0xFFFFFFFFu);
    if (lane == 0) {
        few.largest[block.warp()] = largest;
        few.smallest[block.warp()] = smallest;
    }
    __syncthreads();
    largest = __reduce_max_sync(kFullWarp, few.largest[lane % kSampleWarps]);
    smallest = __reduce_min_sync(kFullWarp, few.smallest[lane % kSampleWarps]);
    if (largest >= kSampleInfinityKey || largest <= kSampleEmptyKey) {
        choice.error = largest >= kSampleInfinityKey ? SampleError::kNotFinite : SampleError::kNoToken;
        return t == 0 ? FewOutcome::kMine : FewOutcome::kOther;
    }
    draw.best = from_ordered_bits(largest);
    if (kind.by_tiles) {
        const uint64_t mass = tells ? draw.weigh.tile_mass(uint64_t{told.w} << 32 | told.z,
                                                           from_ordered_bits(told.x), draw.best)
                                    : 0;
        const uint64_t sum = warp_reduce(mass, Sum{});
        if (lane == 0) {
            few.masses[block.warp()] = sum;
        }
        __syncthreads();
        draw.whole =
            static_cast<double>(warp_reduce(lane < kSampleWarps ? few.masses[lane] : uint64_t{0}, Sum{})) /
            (1 << SampleWeightConstants::kTileBits);
    }
    if (kind.top_k > kSampleBestMax) {
        return FewOutcome::kMore;
    }
    draw.bound = kSampleEmptyKey + 1;
    if (kind.top_k > 0 || kind.by_tiles) {
        draw.bound = bound_of_groups(block, groups, smallest, largest,
                                     static_cast<uint32_t>(kind.top_k > 0 ? kind.top_k : kSampleNucleus));
    }
    draw.bound = max(draw.bound, least_key_of(block.slot(), draw));
    list_few(block, groups, draw);
    __syncthreads();
    if (shared.group_count > 0 || shared.token_count > kFewList) {
        return FewOutcome::kMore;
    }
    return draw_from_few(block, draw, choice);
}

// What choose_few() leaves to do. For the whole block.
__device__ int32_t choose_more(SampleBlock& block, const SampleKind& kind, const FewDraw& draw) {
    SampleShared& shared = block.shared;
    int32_t token = -1;
    __syncthreads();
    const uint32_t again = shared.group_count;
    if (kind.top_k <= kSampleBestMax && again <= kSampleListMax) {
        if (again > 0) {
            list_of_groups(block, static_cast<int>(again), from_ordered_bits(draw.bound), kind.edited);
        }
        if (shared.token_count <= kSampleListMax) {
            token = draw_from_list(block, draw);
            __syncthreads();
        }
    }
    return token >= 0 ? token : draw_slowly(block, draw, kind.edited);
}

// Draws a tile by its mass, and takes its token. For the whole block.
__device__ FewOutcome choose_tile(const FewBlock& block, const FewDraw& draw, Choice& choice) {
    FewShared& few = block.few;
    const int lane = block.tile.lane;
    const auto t = static_cast<int>(threadIdx.x);
    uint4 told{kSampleEmptyKey, 0, 0, 0};
    if (t < block.tiles) {
        uint32_t* from = block.words[t].best;
        told = take_words(from, get_words(from), false);
    }
    const uint32_t key = __reduce_max_sync(kFullWarp, told.x);
    if (lane == 0) {
        few.smallest[block.warp()] = key;
    }
    __syncthreads();
    const uint32_t largest = __reduce_max_sync(kFullWarp, few.smallest[lane % kSampleWarps]);
    if (largest >= kSampleInfinityKey || largest == kSampleEmptyKey) {
        choice.error = largest == kSampleEmptyKey ? SampleError::kNoToken : SampleError::kNotFinite;
        return t == 0 ? FewOutcome::kMine : FewOutcome::kOther;
    }
    const uint64_t mass = draw.weigh.tile_mass(uint64_t{told.w} << 32 | told.z, from_ordered_bits(told.x),
                                               from_ordered_bits(largest));
    const uint64_t scan = warp_scan(mass, lane);
    if (lane == kWarp - 1) {
        few.masses[block.warp()] = scan;
    }
    __syncthreads();
    uint64_t before = 0;
    uint64_t total = 0;
#pragma unroll
    for (int w = 0; w < kFewRowTiles / kWarp; ++w) {
        before = w == block.warp() ? total : before;
        total += few.masses[w];
    }
    const uint64_t point = __umul64hi(draw.fraction, total) - before;
    choice.token = t * kSampleTile + static_cast<int32_t>(told.y);
    return t < block.tiles && scan - mass <= point && point < scan ? FewOutcome::kMine : FewOutcome::kOther;
}

template <int Rounds>
__global__ void __launch_bounds__(kSampleThreads, 1)
    sample_few_kernel(const SampleCudaArgs args, const FewSpan span) {
    extern __shared__ __align__(128) unsigned char memory[];
    FewShared& few = *reinterpret_cast<FewShared*>(memory + kSampleWarps * kSampleTile * 4);
    SampleShared& shared = few.sample;
    FewPlace place{args, span, few, reinterpret_cast<float*>(memory)};
    place.warp = static_cast<int>(threadIdx.x) / kWarp;
    place.lane = static_cast<int>(threadIdx.x) % kWarp;
    place.row = static_cast<int32_t>(blockIdx.x) / span.parts;
    const auto part = static_cast<int32_t>(blockIdx.x) % span.parts;
    place.first_tile = part * span.each;
    place.groups = max(0, min(span.each, span.tiles - place.first_tile)) * kSampleGroups;
    // Right but where a kernel just before has changed it, so that a trip to memory less is waited for.
    int32_t slot_id = load_id(args.row_slots + place.row);
    let_next_kernel_start();
    wait_for_previous_kernel();
    const int32_t certain = load_id(args.row_slots + place.row);
    uint32_t bits = 0;
    while (true) {
        place.slot_id = slot_id;
        if (slot_id >= 0) {
            bits = load_bits<Rounds>(place);  // before it is known whether the slot has penalties
            if (place.warp == 0) {
                SlotWords words;
                words.load(args.slots.slot + slot_id, place.lane);
                words.store(shared.slot, place.lane);
                if (place.lane == 0) {
                    shared.slot.id = slot_id;
                }
            }
        }
        if (slot_id == certain) {
            break;
        }
        slot_id = certain;
    }
    if (slot_id < 0) {
        return;
    }
    __syncthreads();
    // Only now the logits: what is asked for behind those of all blocks comes late.
    FewLane<Rounds> mine;
    load_lane(place, mine);
    // What does not need the logits comes before they are waited for.
    const auto& slot = shared.slot;
    const SampleKind kind(args, slot);
    SampleTileWords* words = static_cast<SampleTileWords*>(args.exchange) + place.row * span.tiles;
    FewWord* group_words =
        reinterpret_cast<FewWord*>(static_cast<SampleTileWords*>(args.exchange) + args.rows * span.tiles) +
        static_cast<int64_t>(place.row) * span.tiles * kSampleGroups;
    const bool finishes = part == span.parts - 1;
    if (!kind.greedy && (kind.by_tiles || finishes)) {
        if (threadIdx.x == kSampleThreads - kWarp) {
            few.fractions = draw_fractions(slot);
            shared.slot.fractions = few.fractions;  // for what choose_more() calls
            shared.slot.kind = kind;
        } else if (threadIdx.x == kSampleThreads - 2 * kWarp) {
            few.weigh = RowWeights(slot);
        }
    }
    const bool penalties = slot.has_penalties();
    FewPenalties found;
    if (penalties) {
        found = find_penalties(place, bits, mine);
    }
    bool finite = true;
#pragma unroll
    for (int r = 0; r < Rounds; ++r) {
        finite = finite && few_max(mine.x[r]) < __int_as_float(0x7F800000);
    }
    uint32_t bad = 0;
    if (__all_sync(kFullWarp, finite) == 0) {
#pragma unroll
        for (int r = 0; r < Rounds; ++r) {
            bad |= few_key(mine.x[r]) >= kSampleInfinityKey ? 1u << r : 0u;
        }
    }
    if (place.groups > 0) {
        if (slot.logprobs != 0) {
            tell_raw(place, mine, words + place.first_tile);
        }
        if (kind.edited) {
            if (args.allowed != nullptr) {
                edit_mask(place, mine);
            }
            if (slot.bias_count > 0 || masks_stops(slot)) {
                edit_named(place, mine);
            }
            if (penalties) {
                edit_penalties(place, found, mine);
            }
        }
        if (kind.greedy) {
            tell_best(place, mine, bad, words[place.first_tile].best);
        } else if (has_lists(kind, span)) {
            tell_list(place, mine, bad, reinterpret_cast<uint64_t*>(group_words) + part * span.slots);
        } else if (kind.cut) {
            tell_groups(place, mine, bad, group_words + place.first_tile * kSampleGroups);
        }
        if (kind.by_tiles) {
            tell_tiles(place, mine, bad, words + place.first_tile);
        }
    }
    if (!finishes) {
        return;
    }
    SampleTile tile{args, slot, place.row, place.x()};
    tile.lane = place.lane;
    FewBlock block{{args, shared, words, span.tiles, tile}, few, span, group_words};
    if (slot.logprobs != 0) {
        __syncthreads();
        const double log_sum = report_top(block);
        if (threadIdx.x == 0) {
            few.log_sum = log_sum;  // a barrier comes before it is read by another
        }
    }
    FewDraw draw;
    if (!kind.greedy) {
        __syncthreads();
        draw.weigh = few.weigh;
        draw.fraction = few.fractions.whole;
        draw.top_k = kind.top_k;
    }
    Choice choice;
    FewOutcome outcome;
    if (has_lists(kind, span)) {
        outcome = choose_listed(block, draw, choice);
    } else if (kind.cut) {
        outcome = choose_few(block, kind, draw, choice);
    } else if (kind.greedy) {
        if (place.warp != 0) {
            return;
        }
        outcome = choose_best(block, choice);
    } else {
        outcome = choose_tile(block, draw, choice);
    }
    if (outcome == FewOutcome::kMore) {
        choice.token = choose_more(block, kind, draw);
        outcome = threadIdx.x == 0 ? FewOutcome::kMine : FewOutcome::kOther;
    }
    if (outcome == FewOutcome::kMine) {
        finish_row(tile, choice, few.log_sum);
    }
}

}  // namespace

int64_t sample_few_exchange_bytes(int64_t vocab, int64_t rows) {
    return rows * tiles_of(vocab) *
           static_cast<int64_t>(sizeof(SampleTileWords) + kSampleGroups * sizeof(FewWord));
}

void sample_few_prepare() {
    for (const auto kernel : {sample_few_kernel<1>, sample_few_kernel<2>, sample_few_kernel<4>}) {
        cuda_check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes));
    }
}

bool sample_few(cudaStream_t stream, const SampleCudaArgs& args) {
    const int64_t tiles = tiles_of(args.vocab);
    if (args.rows > kSampleFewRows || args.rows > args.sm_count || tiles > kFewRowTiles) {
        return false;
    }
    const int64_t most = args.sm_count / args.rows;
    int64_t each = (tiles + most - 1) / most;
    if (each > kFewTiles) {
        return false;
    }
    int64_t parts = (tiles + each - 1) / each;
    // A block of its own finishes the row, where one is left and the next kernel's find room beside.
    if ((parts + 2) * args.rows <= args.sm_count) {
        ++parts;
    }
    const auto kernel = each <= 2   ? sample_few_kernel<1>
                        : each <= 4 ? sample_few_kernel<2>
                                    : sample_few_kernel<4>;
    const FewSpan span{.parts = static_cast<int32_t>(parts),
                       .each = static_cast<int32_t>(each),
                       .tiles = static_cast<int32_t>(tiles),
                       .slots = each <= 2 ? 16 : (each <= 4 ? 24 : 32),
                       .rank = static_cast<int32_t>(each + 3 + std::min<int64_t>(each, 2))};
    cuda_check(launch_dependent({.grid = dim3(static_cast<unsigned>(args.rows * parts)),
                                 .threads = kSampleThreads,
                                 .shared_bytes = kSharedBytes,
                                 .stream = stream},
                                kernel, args, span));
    return true;
}

}  // namespace tessera

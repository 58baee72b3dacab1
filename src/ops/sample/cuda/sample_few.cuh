// A few rows, read by thread blocks that share a row and hold its logits in registers: a warp holds up to
// kFewRoundsMax groups of 128 ids, a lane four neighbours of each. See README.md.
#pragma once

#include "ops/sample/cuda/sample_report.cuh"

namespace tessera::cuda {

inline constexpr int kFewRoundsMax = 4;
inline constexpr int kFewTiles = kFewRoundsMax * kSampleWarps / kSampleGroups;  // that a block holds
inline constexpr int kFewWords = 2;  // groups whose words a thread reads when a row is finished
inline constexpr int kFewRowTiles = kFewWords * kSampleThreads / kSampleGroups;
inline constexpr int kFewBest = 3;   // tokens that a group tells of
inline constexpr int kFewList = 96;  // listed tokens that the quick draw takes
inline constexpr int kFewSums = 64;  // fewer weights than this have a sum below 2^32
inline constexpr int kFewRanges = 2 * kSampleThreads;

// How the rows lie over the blocks.
struct FewSpan {
    int32_t parts = 0;  // blocks of a row
    int32_t each = 0;   // tiles of a block
    int32_t tiles = 0;  // of a row
    // Where a block lists its best tokens: how many words it has for them, and how many of its groups' bests
    // are among them.
    int32_t slots = 0;
    int32_t rank = 0;
};

struct FewShared {
    SampleShared sample;
    // Of the block's groups.
    uint32_t group_keys[kFewTiles * kSampleGroups];
    uint32_t run_sums[kFewTiles * kWarp];
    uint64_t group_exps[kFewTiles * kSampleGroups];
    alignas(16) uint32_t
        group_places[kFewTiles * kSampleGroups];  // the keys, with the group in the lowest bits
    uint32_t listed;
    uint32_t rest;         // key of the best token that found no word
    uint32_t block_bound;  // key from which tokens are listed
    // Of the row that is being finished.
    alignas(16) uint32_t counts[kFewRanges / 2];  // of two ranges of keys
    uint32_t
        places[kFewRowTiles];  // the tiles' best keys, with the tile in the lowest bits: no two are equal
    bool incomplete[kFewRowTiles];  // blocks that have more tokens than they list
    uint64_t bests[kSampleWarps];
    uint32_t largest[kSampleWarps];
    uint32_t smallest[kSampleWarps];
    uint64_t masses[kSampleWarps];
    uint4 ordered[kFewList];  // listed tokens by their ids: key, weight, weights of the better ones, id
    bool made[kFewList];      // of sample.list
    uint32_t bound;
    uint32_t least;
    double log_sum;
    RowWeights weigh;
    SampleFractions fractions;
};

// A word of a group: the keys of its best tokens, the best last, and a byte each of their place in the group
// and, as the highest bit, whether they were made before. The first key is not 0 once it is written.
using FewWord = uint4;

// The logits of one lane.
template <int Rounds>
struct FewLane {
    float x[Rounds][4];
    uint32_t output = 0;  // bit 4 round + i: the token was made before; where the slot has penalties
};

// What a warp reads: groups of one row.
struct FewPlace {
    const SampleCudaArgs& args;
    const FewSpan& span;
    FewShared& few;
    float* tiles = nullptr;  // [kSampleWarps][kSampleTile] in shared memory
    int32_t row = 0;
    int32_t slot_id = 0;
    int32_t first_tile = 0;
    int groups = 0;  // of the block
    int warp = 0;
    int lane = 0;

    __device__ const SampleSlot& slot() const { return few.sample.slot; }
    __device__ float* x() const { return tiles + warp * kSampleTile; }
    __device__ int group(int round) const { return round * kSampleWarps + warp; }  // of the block
    __device__ bool has(int round) const { return group(round) < groups; }
    __device__ int32_t first_id(int round) const {  // of the lane
        return first_tile * kSampleTile + group(round) * kSampleGroup + 4 * lane;
    }
};

__device__ __forceinline__ float4 load_logits(const float* from) {
    float4 x;
    asm volatile("ld.global.cg.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(x.x), "=f"(x.y), "=f"(x.z), "=f"(x.w)
                 : "l"(from));
    return x;
}

template <int Rounds>
__device__ __forceinline__ void load_lane(const FewPlace& place, FewLane<Rounds>& mine) {
    const float* logits = place.args.logits + place.row * place.args.logits_stride;
    const auto vocab = static_cast<int32_t>(place.args.vocab);
    const bool aligned = reinterpret_cast<uintptr_t>(logits) % 16 == 0 && vocab % 4 == 0;
#pragma unroll
    for (int r = 0; r < Rounds; ++r) {
        const int32_t id = place.first_id(r);
        float4 x = make_float4(minus_infinity(), minus_infinity(), minus_infinity(), minus_infinity());
        if (aligned) {
            if (place.has(r) && id < vocab) {
                x = load_logits(logits + id);
            }
        } else if (place.has(r)) {
            x.x = id < vocab ? __ldcg(logits + id) : x.x;
            x.y = id + 1 < vocab ? __ldcg(logits + id + 1) : x.y;
            x.z = id + 2 < vocab ? __ldcg(logits + id + 2) : x.z;
            x.w = id + 3 < vocab ? __ldcg(logits + id + 3) : x.w;
        }
        mine.x[r][0] = x.x;
        mine.x[r][1] = x.y;
        mine.x[r][2] = x.z;
        mine.x[r][3] = x.w;
    }
}

// 32 bits of the tokens that the slot has seen: lane 4 r + i has those of the prompt for the i-th 32 ids of
// round r, lane 16 + 4 r + i those of the tokens made.
template <int Rounds>
__device__ __forceinline__ uint32_t load_bits(const FewPlace& place) {
    const SampleCudaArgs& args = place.args;
    const int64_t words = (args.vocab + 63) / 64 * 2;
    const int r = place.lane / 4 % 4;
    const int64_t word = (place.first_id(r) - 4 * place.lane) / kWarp + place.lane % 4;
    const uint64_t* all = place.lane < kWarp / 2 ? args.slots.prompt_seen : args.slots.output_seen;
    return r < Rounds && place.has(r) && word < words && all != nullptr
               ? load_word(reinterpret_cast<const uint32_t*>(all) + place.slot_id * words + word)
               : 0u;
}

// x[i] with an index that is not a constant, in registers.
template <int Rounds>
__device__ __forceinline__ float few_get(const FewLane<Rounds>& mine, int i) {
    float value = mine.x[0][0];
#pragma unroll
    for (int j = 1; j < 4 * Rounds; ++j) {
        value = i == j ? mine.x[j / 4][j % 4] : value;
    }
    return value;
}
template <int Rounds>
__device__ __forceinline__ void few_set(FewLane<Rounds>& mine, int i, float value) {
#pragma unroll
    for (int j = 0; j < 4 * Rounds; ++j) {
        mine.x[j / 4][j % 4] = i == j ? value : mine.x[j / 4][j % 4];
    }
}

// The few tokens of a warp that have penalties, spread over its lanes: what the lane knows of its first. Each
// is its place in the warp's logits, with a bit each for the prompt and for the tokens made.
struct FewPenalties {
    static constexpr uint32_t kPlace = 0x1FFF;
    static constexpr int kPromptBit = 13;
    static constexpr int kMadeBit = 14;
    int count = 0;  // of the warp
    uint32_t token = 0;
    int32_t times = 0;  // made

    __device__ static int32_t times_of(const FewPlace& place, uint32_t token) {
        const auto at = static_cast<int32_t>(token & kPlace);
        const int32_t id = place.first_id(0) - 4 * place.lane +
                           at / kSampleGroup * (kSampleWarps * kSampleGroup) + at % kSampleGroup;
        const int32_t* counts = place.args.slots.output_counts + place.slot_id * place.args.vocab;
        return (token >> kMadeBit & 1) != 0 ? __ldcg(counts + id) : 0;
    }
    // In the warp's memory, behind its logits.
    __device__ static uint16_t* list(const FewPlace& place, int rounds) {
        return reinterpret_cast<uint16_t*>(place.x() + rounds * kSampleGroup);
    }
};

// Finds them, and asks for their counts. bits: of load_bits().
template <int Rounds>
__device__ __forceinline__ FewPenalties find_penalties(const FewPlace& place, uint32_t bits,
                                                       FewLane<Rounds>& mine) {
    const uint32_t others = __shfl_xor_sync(kFullWarp, bits, kWarp / 2);
    const bool low = place.lane < kWarp / 2;
    const uint32_t prompt = low ? bits : others;
    const uint32_t output = low ? others : bits;
    uint32_t left = low ? prompt | output : 0u;
    FewPenalties found;
    if (__any_sync(kFullWarp, left != 0) == 0) {
        return found;
    }
    uint16_t* const list = FewPenalties::list(place, Rounds);
#pragma unroll
    for (int r = 0; r < Rounds; ++r) {
        const uint32_t word = __shfl_sync(kFullWarp, output, 4 * r + place.lane / 8);
        mine.output |= (word >> (4 * place.lane % kWarp) & 15) << (4 * r);
    }
    const int own = __popc(left);
    const int scan = warp_scan(own, place.lane);
    for (int at = scan - own; left != 0; left &= left - 1, ++at) {
        const int bit = __ffs(static_cast<int>(left)) - 1;
        list[at] = static_cast<uint16_t>((place.lane * kWarp + bit) |
                                         (prompt >> bit & 1) << FewPenalties::kPromptBit |
                                         (output >> bit & 1) << FewPenalties::kMadeBit);
    }
    __syncwarp();
    found.count = __shfl_sync(kFullWarp, scan, kWarp - 1);
    found.token = place.lane < found.count ? list[place.lane] : 0u;
    found.times = FewPenalties::times_of(place, found.token);
    return found;
}

template <int Rounds>
__device__ __forceinline__ void edit_penalties(const FewPlace& place, const FewPenalties& found,
                                               FewLane<Rounds>& mine) {
    if (found.count == 0) {
        return;
    }
    float* const x = place.x();
    auto* const lane_x = reinterpret_cast<float4*>(x) + place.lane;
#pragma unroll
    for (int r = 0; r < Rounds; ++r) {
        lane_x[r * kWarp] = make_float4(mine.x[r][0], mine.x[r][1], mine.x[r][2], mine.x[r][3]);
    }
    __syncwarp();
    const Penalties penalties(place.slot());
    uint32_t token = found.token;
    int32_t times = found.times;
#pragma unroll 1
    for (int n = place.lane; n < found.count;) {
        float& value = x[token & FewPenalties::kPlace];
        value = penalties(value, (token >> FewPenalties::kPromptBit & 1) != 0, times);
        n += kWarp;
        if (n < found.count) {
            token = FewPenalties::list(place, Rounds)[n];
            times = FewPenalties::times_of(place, token);
        }
    }
    __syncwarp();
#pragma unroll
    for (int r = 0; r < Rounds; ++r) {
        const float4 v = lane_x[r * kWarp];
        mine.x[r][0] = v.x;
        mine.x[r][1] = v.y;
        mine.x[r][2] = v.z;
        mine.x[r][3] = v.w;
    }
}

template <int Rounds>
__device__ inline void edit_mask(const FewPlace& place, FewLane<Rounds>& mine) {
    const SampleCudaArgs& args = place.args;
    const int64_t words = (args.vocab + 31) / 32;
    uint32_t allowed[Rounds];
#pragma unroll
    for (int r = 0; r < Rounds; ++r) {
        const int64_t word = place.first_id(r) / kWarp;
        allowed[r] = place.has(r) && word < words ? __ldcg(args.allowed + place.row * words + word) : 0u;
    }
#pragma unroll
    for (int r = 0; r < Rounds; ++r) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if ((allowed[r] >> (4 * place.lane % kWarp + i) & 1) == 0) {
                mine.x[r][i] = minus_infinity();
            }
        }
    }
}

// The edits that name their tokens: stop ids, then biases, each in its order.
template <int Rounds>
__device__ inline void edit_named(const FewPlace& place, FewLane<Rounds>& mine) {
    const SampleCudaArgs& args = place.args;
    const SampleSlot& slot = place.slot();
    // f(index) where the id is one of this lane's.
    const auto at = [&](int32_t id, auto f) {
        const int32_t group = id / kSampleGroup - place.first_tile * kSampleGroups;
        if (id >= 0 && id < args.vocab && group >= 0 && group < place.groups &&
            group % kSampleWarps == place.warp && id % kSampleGroup / 4 == place.lane) {
            f(group / kSampleWarps * 4 + id % 4);
        }
    };
#pragma unroll 1
    for (int32_t i = 0; masks_stops(slot) && i < slot.stop_count; ++i) {
        at(slot.stop_ids[i], [&](int j) { few_set(mine, j, minus_infinity()); });
    }
    const int64_t base = static_cast<int64_t>(place.slot_id) * kSampleBiasMax;
#pragma unroll 1
    for (int32_t i0 = 0; i0 < slot.bias_count; i0 += kWarp) {
        const int32_t i = i0 + place.lane;
        const bool here = i < slot.bias_count;
        const int32_t id = here ? args.slots.bias_ids[base + i] : -1;
        const float value = here ? args.slots.bias_values[base + i] : 0;
#pragma unroll 1
        for (int j = 0; j < kWarp && i0 + j < slot.bias_count; ++j) {
            const float bias = __shfl_sync(kFullWarp, value, j);
            at(__shfl_sync(kFullWarp, id, j),
               [&](int k) { few_set(mine, k, biased(few_get(mine, k), bias)); });
        }
    }
}

__device__ __forceinline__ float few_max(const float (&x)[4]) {
    return max_or_nan(max_or_nan(x[0], x[1]), max_or_nan(x[2], x[3]));
}
__device__ __forceinline__ uint32_t few_key(const float (&x)[4]) {
    return __reduce_max_sync(kFullWarp, ordered_bits(few_max(x)));
}
// Tells of the raw logits, as tell_raw() does. For the whole block.
template <int Rounds>
__device__ inline void tell_raw(const FewPlace& place, const FewLane<Rounds>& mine, SampleTileWords* words) {
    FewShared& few = place.few;
#pragma unroll
    for (int r = 0; r < Rounds; ++r) {
        const uint32_t key = few_key(mine.x[r]);
        if (place.has(r) && place.lane == 0) {
            const int group = place.group(r);
            few.group_keys[group] = key;
            asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(words[group / kSampleGroups].raw_groups +
                                                                     group % kSampleGroups),
                         "r"(key)
                         : "memory");
        }
    }
    __syncthreads();
#pragma unroll
    for (int r = 0; r < Rounds; ++r) {
        if (place.has(r)) {
            const uint32_t* keys = few.group_keys + place.group(r) / kSampleGroups * kSampleGroups;
            const float best =
                from_ordered_bits(__reduce_max_sync(kFullWarp, keys[place.lane % kSampleGroups]));
            uint64_t sum = 0;
            if (best > minus_infinity()) {
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    sum += exp_below(mine.x[r][i], best);
                }
            }
            sum = warp_reduce(sum, Sum{});
            if (place.lane == 0) {
                few.group_exps[place.group(r)] = sum;
            }
        }
    }
    __syncthreads();
    const auto t = static_cast<int>(threadIdx.x);
    if (t < place.groups / kSampleGroups) {
        uint32_t key = 0;
        uint64_t sum = 0;
        for (int g = t * kSampleGroups; g < (t + 1) * kSampleGroups; ++g) {
            key = max(key, few.group_keys[g]);
            sum += few.group_exps[g];
        }
        put_words(words[t].raw, key, 0, exp_sum_word(sum));
    }
    __syncthreads();
}

// The tiles' best tokens, sums and draws. bad: of the rounds with a logit that is not finite. For the whole
// block, of which some warp sets few.weigh and few.fractions before.
template <int Rounds>
__device__ inline void tell_tiles(const FewPlace& place, const FewLane<Rounds>& mine, uint32_t bad,
                                  SampleTileWords* words) {
    FewShared& few = place.few;
    constexpr int kRuns = kSampleGroup / kSampleRun;
    uint32_t best[Rounds];
#pragma unroll
    for (int r = 0; r < Rounds; ++r) {
        best[r] = (bad >> r & 1) != 0 ? 0xFFFFFFFFu : few_key(mine.x[r]);
    }
#pragma unroll
    for (int r = 0; r < Rounds; ++r) {
        if (place.lane == 0) {
            few.group_keys[place.group(r)] = best[r];
        }
        reinterpret_cast<float4*>(place.x())[r * kWarp + place.lane] =
            make_float4(mine.x[r][0], mine.x[r][1], mine.x[r][2], mine.x[r][3]);
    }
    __syncthreads();
    const RowWeights weigh = few.weigh;
    uint32_t own[Rounds];
#pragma unroll
    for (int r = 0; r < Rounds; ++r) {
        const uint32_t* keys = few.group_keys + place.group(r) / kSampleGroups * kSampleGroups;
        best[r] = __reduce_max_sync(kFullWarp, keys[place.lane % kSampleGroups]);
    }
#pragma unroll
    for (int r = 0; r < Rounds; ++r) {
        const float most = from_ordered_bits(best[r]);
        const uint32_t sum = weigh(mine.x[r][0], most) + weigh(mine.x[r][1], most) +
                             weigh(mine.x[r][2], most) + weigh(mine.x[r][3], most);
        own[r] = best[r] > kSampleEmptyKey && best[r] < kSampleInfinityKey ? sum : 0;
    }
#pragma unroll
    for (int r = 0; r < Rounds; ++r) {
        const uint32_t sum = warp_reduce<kSampleRun / 4>(own[r], Sum{});
        if (place.lane % (kSampleRun / 4) == 0) {
            few.run_sums[place.group(r) * kRuns + place.lane / (kSampleRun / 4)] = sum;
        }
    }
    __syncthreads();
    const int tile = place.warp;
    if (tile * kSampleGroups >= place.groups) {
        return;
    }
    const uint32_t key =
        __reduce_max_sync(kFullWarp, few.group_keys[tile * kSampleGroups + place.lane % kSampleGroups]);
    // As draw_in_tile().
    const uint32_t run = few.run_sums[tile * kWarp + place.lane];
    const uint32_t scan = warp_scan(run >> SampleWeightConstants::kRunBits, place.lane);
    const uint32_t total = __shfl_sync(kFullWarp, scan, kWarp - 1);
    if (total == 0) {
        if (place.lane == 0) {
            put_words(words[tile].best, key, 0, 0);
        }
        return;
    }
    const uint64_t fraction = few.fractions.tile;
    const int owner = first_lane(scan > __umulhi(static_cast<uint32_t>(fraction >> 32), total));
    const uint32_t point = __umulhi(static_cast<uint32_t>(fraction), __shfl_sync(kFullWarp, run, owner));
    const int of_block = tile * kSampleGroups + owner / kRuns;
    const float* from = place.tiles + of_block % kSampleWarps * kSampleTile +
                        of_block / kSampleWarps * kSampleGroup + owner % kRuns * kSampleRun;
    const uint32_t in_run = warp_scan(weigh(from[place.lane], from_ordered_bits(key)), place.lane);
    const int at = first_lane(in_run > point);
    if (place.lane == 0) {
        put_words(words[tile].best, key, static_cast<uint32_t>(owner * kSampleRun + at),
                  uint64_t{total} << SampleWeightConstants::kRunBits);
    }
}

// The block's best token, at ties the lowest id. For the whole block.
template <int Rounds>
__device__ __forceinline__ void tell_best(const FewPlace& place, const FewLane<Rounds>& mine, uint32_t bad,
                                          uint32_t* word) {
    FewShared& few = place.few;
    float most = few_max(mine.x[0]);
#pragma unroll
    for (int r = 1; r < Rounds; ++r) {
        most = max_or_nan(most, few_max(mine.x[r]));
    }
    const uint32_t own = ordered_bits(most);
    const uint32_t key = bad != 0 ? 0xFFFFFFFFu : __reduce_max_sync(kFullWarp, own);
    uint32_t id = 0xFFFFFFFFu;  // and whether it was made, as the lowest bit
#pragma unroll
    for (int r = Rounds - 1; r >= 0; --r) {
#pragma unroll
        for (int i = 3; i >= 0; --i) {
            id = mine.x[r][i] == most
                     ? static_cast<uint32_t>(place.first_id(r) + i) << 1 | (mine.output >> (4 * r + i) & 1)
                     : id;
        }
    }
    id = __reduce_min_sync(kFullWarp, own == key ? id : 0xFFFFFFFFu);
    if (place.lane == 0) {
        few.bests[place.warp] = uint64_t{key} << 32 | (0xFFFFFFFFu - id);
    }
    __syncthreads();
    if (place.warp == 0) {
        const uint64_t best = few.bests[place.lane % kSampleWarps];
        const auto high = static_cast<uint32_t>(best >> 32);
        const uint32_t largest = __reduce_max_sync(kFullWarp, high);
        const uint32_t low = __reduce_max_sync(kFullWarp, high == largest ? static_cast<uint32_t>(best) : 0u);
        if (place.lane == 0) {
            put_words(word, largest, low, 0);
        }
    }
}

// A listed token: its key, and its id with kFewMade. Where there is none: key 1; the last word of a block has
// the largest key that it does not list.
inline constexpr uint32_t kFewMade = 0x80000000u;
inline constexpr uint32_t kFewRest = 0x40000000u;
__device__ __forceinline__ void put_listed(uint64_t* to, uint32_t key, uint32_t id) {
    asm volatile("st.relaxed.gpu.global.u64 [%0], %1;" ::"l"(to), "l"(uint64_t{id} << 32 | key) : "memory");
}

// Lists the block's best tokens: those that reach the best of the group that is span.rank-th. For the whole
// block.
template <int Rounds>
__device__ __forceinline__ void tell_list(const FewPlace& place, const FewLane<Rounds>& mine, uint32_t bad,
                                          uint64_t* words) {
    FewShared& few = place.few;
    const FewSpan& span = place.span;
    constexpr int kGroups = Rounds * kSampleWarps;
    constexpr int kSpread = 4;  // threads a group
    const auto t = static_cast<int>(threadIdx.x);
    uint32_t keys[Rounds][4];
    uint32_t best[Rounds];
#pragma unroll
    for (int r = 0; r < Rounds; ++r) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            keys[r][i] = ordered_bits(mine.x[r][i]);
        }
        best[r] = max(max(keys[r][0], keys[r][1]), max(keys[r][2], keys[r][3]));
    }
#pragma unroll
    for (int r = 0; r < Rounds; ++r) {
        best[r] = __reduce_max_sync(kFullWarp, best[r]);
    }
#pragma unroll
    for (int r = 0; r < Rounds; ++r) {
        if (place.lane == 0) {
            const int group = place.group(r);
            few.group_places[group] = place.has(r)
                                          ? (best[r] & ~uint32_t{kGroups - 1}) | (kGroups - 1 - group)
                                          : static_cast<uint32_t>(kGroups - 1 - group);
        }
    }
    if (t == 0) {
        few.listed = 0;
        few.rest = 0;
    }
    __syncthreads();
    if (place.lane == 0 && bad != 0) {
        few.rest = 0xFFFFFFFFu;
    }
    if (t < kGroups * kSpread) {
        const uint32_t own = few.group_places[t / kSpread];
        int better = 0;
#pragma unroll 1
        for (int i = t % kSpread; i < kGroups / 4; i += kSpread) {
            const uint4 others = reinterpret_cast<const uint4*>(few.group_places)[i];
            better += (others.x > own ? 1 : 0) + (others.y > own ? 1 : 0) + (others.z > own ? 1 : 0) +
                      (others.w > own ? 1 : 0);
        }
        better = warp_reduce<kSpread>(better, Sum{});
        if (better == min(span.rank, place.groups) - 1 && t % kSpread == 0) {
            few.block_bound = max(own & ~uint32_t{kGroups - 1}, kSampleEmptyKey + 1);
        }
    }
    __syncthreads();
    const uint32_t bound = few.block_bound;
    uint32_t tokens = 0;
#pragma unroll
    for (int r = 0; r < Rounds; ++r) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            tokens |= keys[r][i] >= bound ? 1u << (4 * r + i) : 0u;
        }
    }
#pragma unroll 1
    for (; tokens != 0; tokens &= tokens - 1) {
        const int i = __ffs(static_cast<int>(tokens)) - 1;
        const auto at = static_cast<int>(atomicAdd(&few.listed, 1));
        const uint32_t key = ordered_bits(few_get(mine, i));
        if (at < span.slots - 1) {
            put_listed(words + at, key,
                       static_cast<uint32_t>(place.first_id(i / 4) + i % 4) |
                           ((mine.output >> i & 1) != 0 ? kFewMade : 0u));
        } else {
            atomicMax(&few.rest, key);
        }
    }
    __syncthreads();
    if (t >= static_cast<int>(few.listed) && t < span.slots - 1) {
        put_listed(words + t, 1, 0);
    } else if (t == span.slots - 1) {
        put_listed(words + t, max(few.rest, bound - 1), kFewRest);
    }
}

// The groups' best tokens.
template <int Rounds>
__device__ __forceinline__ void tell_groups(const FewPlace& place, const FewLane<Rounds>& mine, uint32_t bad,
                                            FewWord* words) {
    uint32_t keys[Rounds][4];
    FewWord word[Rounds];
#pragma unroll
    for (int r = 0; r < Rounds; ++r) {
        word[r] = {};
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            keys[r][i] = ordered_bits(mine.x[r][i]);
        }
    }
#pragma unroll 1
    for (int n = 0; n < kFewBest; ++n) {
        uint32_t most[Rounds];
        uint32_t best[Rounds];
        int owner[Rounds];
        uint32_t at[Rounds];
#pragma unroll
        for (int r = 0; r < Rounds; ++r) {
            most[r] = max(max(keys[r][0], keys[r][1]), max(keys[r][2], keys[r][3]));
        }
#pragma unroll
        for (int r = 0; r < Rounds; ++r) {
            best[r] = __reduce_max_sync(kFullWarp, most[r]);
        }
#pragma unroll
        for (int r = 0; r < Rounds; ++r) {
            owner[r] = first_lane(most[r] == best[r]);
        }
#pragma unroll
        for (int r = 0; r < Rounds; ++r) {
            const int i = keys[r][0] == most[r]   ? 0
                          : keys[r][1] == most[r] ? 1
                          : keys[r][2] == most[r] ? 2
                                                  : 3;
            const uint32_t made = mine.output >> (4 * r + i) & 1;
            at[r] = __shfl_sync(kFullWarp, static_cast<uint32_t>(4 * place.lane + i) | made << 7, owner[r]);
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                keys[r][j] = place.lane == owner[r] && i == j ? 0 : keys[r][j];
            }
        }
#pragma unroll
        for (int r = 0; r < Rounds; ++r) {
            word[r] = {max(best[r], 1u), word[r].x, word[r].y, word[r].w << 8 | at[r]};
        }
    }
#pragma unroll
    for (int r = 0; r < Rounds; ++r) {
        if (place.has(r) && place.lane == 0) {
            const uint32_t is_bad = (bad >> r & 1) != 0 ? 0xFFFFFFFFu : 0u;
            put_words(reinterpret_cast<uint32_t*>(words + place.group(r)), word[r].x | is_bad,
                      word[r].y | is_bad, uint64_t{word[r].w} << 32 | (word[r].z | is_bad));
        }
    }
}

}  // namespace tessera::cuda

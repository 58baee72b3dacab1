// One warp's work on one tile of 1,024 ids in shared memory: the edits of its logits, and what the row needs
// to know of it, written as words (of few rows such that tell on their own that they are there).
//
// A tile is eight groups of 128 ids: neighbours while a row is read, any groups where some are read again.
// Lane l holds the 32 logits from position 32 l on.
#pragma once

#include "ops/common/cuda/reduce.cuh"
#include "ops/sample/cuda/sample_row.cuh"

namespace tessera::cuda {

inline constexpr int kSampleGroup = 128;
inline constexpr int kSampleGroups = kSampleTile / kSampleGroup;  // of a tile

// Keys are ordered_bits(); that of -inf is the lowest of any logit, and those from +inf on are not finite.
inline constexpr uint32_t kSampleEmptyKey = 0x007FFFFFu;
inline constexpr uint32_t kSampleInfinityKey = 0xFF800000u;

// What blocks tell each other of a tile. Of few rows (sample_few.cu) no word is 0 once it is written, and its
// reader sets it to 0 again; of many the next kernel reads them, which waits for no word.
struct alignas(32) SampleTileWords {
    uint32_t best[4];                // key, place of the token in the tile, sum of its tokens' weights (2)
    uint32_t raw[4];                 // before the edits: key, 0, sum of exp(x - best) as a double (2)
    uint32_t groups[kSampleGroups];  // keys
    uint32_t raw_groups[kSampleGroups];
};

__device__ __forceinline__ void put_words(uint32_t* to, uint32_t key, uint32_t second, uint64_t rest) {
    asm volatile(
        "{\n"
        ".reg .b128 words;\n"
        "mov.b128 words, {%1, %2};\n"
        "st.relaxed.gpu.global.b128 [%0], words;\n"
        "}\n" ::"l"(to),
        "l"(uint64_t{second} << 32 | key), "l"(rest)
        : "memory");
}
__device__ __forceinline__ uint4 get_words(const uint32_t* from) {
    uint64_t low, high;
    asm volatile(
        "{\n"
        ".reg .b128 words;\n"
        "ld.relaxed.gpu.global.b128 words, [%2];\n"
        "mov.b128 {%0, %1}, words;\n"
        "}\n"
        : "=l"(low), "=l"(high)
        : "l"(from)
        : "memory");
    return make_uint4(static_cast<uint32_t>(low), static_cast<uint32_t>(low >> 32),
                      static_cast<uint32_t>(high), static_cast<uint32_t>(high >> 32));
}
// Waits until the words are there, and clears them.
__device__ __forceinline__ uint4 take_words(uint32_t* from, uint4 words, bool all) {
    while (all ? words.x == 0 || words.y == 0 || words.z == 0 || words.w == 0 : words.x == 0) {
        words = get_words(from);
    }
    put_words(from, 0, 0, 0);
    return words;
}

// The largest of a and b; NaN when one is.
__device__ __forceinline__ float max_or_nan(float a, float b) {
    float c;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(c) : "f"(a), "f"(b));
    return c;
}

// A lane's 32 logits, in an order of their own. They stay in shared memory: to hold them takes registers that
// the weights' chains of operations need.
struct SampleLane {
    const float4* x = nullptr;  // of the lane
    int lane = 0;

    __device__ __forceinline__ SampleLane(const float* tile, int its)
        : x(reinterpret_cast<const float4*>(tile) + 8 * its), lane(its) {}
    __device__ __forceinline__ float4 at(int j) const { return x[j ^ (lane % 8)]; }  // no bank conflicts

    // The key of the largest.
    __device__ __forceinline__ uint32_t key() const {
        float best = minus_infinity();
#pragma unroll
        for (int j = 0; j < 8; ++j) {
            const float4 v = at(j);
            best = max_or_nan(best, max_or_nan(max_or_nan(v.x, v.y), max_or_nan(v.z, v.w)));
        }
        return ordered_bits(best);
    }
    template <typename T, typename F>
    __device__ __forceinline__ T sum(F of) const {
        T all = 0;
#pragma unroll 4
        for (int j = 0; j < 8; ++j) {
            const float4 v = at(j);
            all += of(v.x) + of(v.y) + of(v.z) + of(v.w);
        }
        return all;
    }
};

// The sum of the lanes' values up to this one.
template <typename T>
__device__ __forceinline__ T warp_scan(T value, int lane) {
#pragma unroll
    for (int offset = 1; offset < kWarp; offset *= 2) {
        const T other = __shfl_up_sync(kFullWarp, value, offset);
        value += lane >= offset ? other : T{0};
    }
    return value;
}
__device__ __forceinline__ int first_lane(bool here) {
    return __ffs(static_cast<int>(__ballot_sync(kFullWarp, here))) - 1;
}

// A tile and the row it belongs to.
struct SampleTile {
    const SampleCudaArgs& args;
    const SampleRowSlot& slot;
    int32_t row = 0;
    float* x = nullptr;  // [kSampleTile] in shared memory; what is no token is -inf
    int32_t first = 0;   // lane l: the first id of group l % 8; a group that is not there begins at vocab
    int lane = 0;

    __device__ int32_t first_of(int group) const { return __shfl_sync(kFullWarp, first, group); }
};

// Bits of a lane's 32 tokens. Most outputs were made once: only of the others the count is read.
struct SampleSeen {
    uint32_t prompt = 0;
    uint32_t output = 0;
    uint32_t often = 0;  // made more than once
    int32_t word = 0;    // ids from 32 word on
};
__device__ __forceinline__ SampleSeen load_seen(const SampleCudaArgs& args, int32_t slot_id, int32_t word) {
    const auto words = static_cast<int32_t>((args.vocab + 63) / 64 * 2);
    if (word >= words) {
        return {0, 0, 0, word};
    }
    const int64_t at = int64_t{slot_id} * words + word;
    const auto bits = [at](const uint64_t* all) {
        return load_word(reinterpret_cast<const uint32_t*>(all) + at);
    };
    return {bits(args.slots.prompt_seen), bits(args.slots.output_seen), bits(args.slots.output_often), word};
}
__device__ __forceinline__ SampleSeen load_seen(const SampleTile& tile, int32_t word) {
    return tile.slot.has_penalties() ? load_seen(tile.args, tile.slot.id, word) : SampleSeen();
}
__device__ inline SampleSeen load_seen(const SampleTile& tile) {
    return load_seen(tile, tile.first_of(tile.lane / 4) / kWarp + tile.lane % 4);
}
__device__ inline const int32_t* counts_of(const SampleTile& tile, const SampleSeen& seen) {
    return tile.args.slots.output_counts + tile.slot.id * tile.args.vocab + int64_t{seen.word} * kWarp;
}

// Asks for the counts of a tile that is still to come. seen: of load_seen().
__device__ inline void prefetch_counts(const SampleTile& tile, const SampleSeen& seen) {
    const int32_t* counts = counts_of(tile, seen) - 1;
    for (uint32_t left = seen.often; left != 0; left &= left - 1) {
        asm volatile("prefetch.global.L2 [%0];" ::"l"(counts + __ffs(static_cast<int>(left))));
    }
}

// The penalties of the few tokens that have any; what is not finite stays so. seen: of load_seen().
__device__ inline void apply_penalties(const SampleTile& tile, const SampleSeen& seen) {
    const Penalties penalties(tile.slot);
    float* x = tile.x + kWarp * tile.lane;
#pragma unroll 1
    for (uint32_t left = seen.prompt | seen.output; left != 0; left &= left - 1) {
        const int bit = __ffs(static_cast<int>(left)) - 1;
        const int32_t count = (seen.often >> bit & 1) != 0 ? counts_of(tile, seen)[bit]
                                                           : static_cast<int32_t>(seen.output >> bit & 1);
        const float old = x[bit];
        if (old <= kSampleLogitMax) {
            x[bit] = penalties(old, (seen.prompt >> bit & 1) != 0, count);
        }
    }
    __syncwarp();
}

// Tokens that the mask does not allow.
__device__ inline void apply_mask(const SampleTile& tile) {
    const int64_t words = (tile.args.vocab + 31) / 32;
    const int64_t word = tile.first_of(tile.lane / 4) / 32 + tile.lane % 4;
    const uint32_t mine = word < words ? tile.args.allowed[tile.row * words + word] : 0u;
#pragma unroll 4
    for (int i = 0; i < kWarp; ++i) {
        if ((__shfl_sync(kFullWarp, mine, i) >> tile.lane & 1) == 0) {
            tile.x[kWarp * i + tile.lane] = minus_infinity();
        }
    }
    __syncwarp();
}

// The edits that name their tokens: stop ids, then biases (-inf stays -inf in any order). A lane each group.
__device__ inline void apply_named_edits(const SampleTile& tile) {
    const SampleSlot& slot = tile.slot;
    float* group = tile.x + tile.lane * kSampleGroup;
    const auto place = [&](int32_t id) {  // -1: not of this lane's group
        const int32_t i = id - tile.first;
        return tile.lane < kSampleGroups && id < tile.args.vocab && i >= 0 && i < kSampleGroup ? i : -1;
    };
    for (int32_t i = 0; masks_stops(slot) && i < slot.stop_count; ++i) {
        const int32_t at = place(slot.stop_ids[i]);
        if (at >= 0) {
            group[at] = minus_infinity();
        }
    }
    const int64_t base = static_cast<int64_t>(tile.slot.id) * kSampleBiasMax;
    for (int32_t i = 0; i < slot.bias_count; ++i) {  // an id may have several, which add up in their order
        const int32_t at = place(tile.args.slots.bias_ids[base + i]);
        if (at >= 0) {
            group[at] = biased(group[at], tile.args.slots.bias_values[base + i]);
        }
    }
    __syncwarp();
}

// Everything between the raw logits and the temperature, in place. The order is that of sample.h. True where
// anything has changed.
__device__ inline bool edit_tile(const SampleTile& tile, const SampleSeen& seen) {
    bool changed = tile.slot.kind.named;
    __syncwarp();  // the other lanes have read what this one writes
    if (changed) {
        if (tile.args.allowed != nullptr) {
            apply_mask(tile);
        }
        apply_named_edits(tile);
    }
    if (__any_sync(kFullWarp, (seen.prompt | seen.output) != 0)) {
        apply_penalties(tile, seen);
        changed = true;
    }
    return changed;
}

// The token drawn from the tile by its tokens' weights, from the run of a lane; their sum too, as tile_mass()
// takes it.
struct TileDraw {
    uint32_t place = 0;
    uint64_t sum = 0;
};
__device__ __forceinline__ TileDraw draw_in_tile(const SampleTile& tile, const SampleLane& mine, float best) {
    const RowWeights weigh = tile.slot.weigh;
    const auto own = mine.sum<uint32_t>([&](float x) { return weigh(x, best); });  // a run: at most 2^31
    const uint32_t scan = warp_scan(own >> SampleWeightConstants::kRunBits, tile.lane);
    const uint32_t sum = __shfl_sync(kFullWarp, scan, kWarp - 1);
    const uint64_t fraction = tile.slot.fractions.tile;
    const int owner = first_lane(scan > __umulhi(static_cast<uint32_t>(fraction >> 32), sum));
    const uint32_t point = __umulhi(static_cast<uint32_t>(fraction), __shfl_sync(kFullWarp, own, owner));
    const uint32_t in_run = warp_scan(weigh(tile.x[kWarp * owner + tile.lane], best), tile.lane);
    return {static_cast<uint32_t>(kWarp * owner + first_lane(in_run > point)),
            uint64_t{sum} << SampleWeightConstants::kRunBits};
}

__device__ __forceinline__ void put_groups(uint32_t (&groups)[kSampleGroups], uint32_t lane_key, int lane) {
    const uint32_t key = warp_reduce<kWarp / kSampleGroups>(lane_key, Max{});
    if (lane % (kWarp / kSampleGroups) == 0) {
        asm volatile("st.relaxed.gpu.global.u32 [%0], %1;" ::"l"(groups + lane / (kWarp / kSampleGroups)),
                     "r"(key)
                     : "memory");
    }
}

// Tells of the raw logits. lane_key: of the largest of the lane's, key: of the tile's.
__device__ inline void tell_raw(const SampleTile& tile, SampleTileWords& words, uint32_t lane_key,
                                uint32_t key) {
    const SampleLane mine(tile.x, tile.lane);
    const float best = from_ordered_bits(key);
    uint64_t sum = 0;
    if (best > minus_infinity()) {
        sum = mine.sum<uint64_t>([best](float x) { return exp_below(x, best); });
    }
    sum = warp_reduce(sum, Sum{});
    if (tile.lane == 0) {
        put_words(words.raw, key, 0, exp_sum_word(sum));
    }
    put_groups(words.raw_groups, lane_key, tile.lane);
}

// All that the row needs of a tile that has been brought.
__device__ inline void tell_tile(const SampleTile& tile, const SampleKind& kind, const SampleSeen& seen,
                                 SampleTileWords& words) {
    const SampleLane mine(tile.x, tile.lane);
    uint32_t lane_key = 0;
    uint32_t key = 0;
    // Penalties alone leave what is not finite as it is: then the logits are looked at once.
    const bool before = kind.named || tile.slot.logprobs != 0;
    bool again = !before;
    if (before) {
        lane_key = mine.key();
        key = __reduce_max_sync(kFullWarp, lane_key);
        if (tile.slot.logprobs != 0) {
            tell_raw(tile, words, lane_key, key);
        }
    }
    if (kind.edited && key < kSampleInfinityKey) {
        again = edit_tile(tile, seen) || again;
    }
    if (again) {
        lane_key = mine.key();
        key = __reduce_max_sync(kFullWarp, lane_key);
    }
    if (kind.cut) {
        put_groups(words.groups, lane_key, tile.lane);
    }
    const float best = from_ordered_bits(key);
    TileDraw draw;
    if (kind.by_tiles && key > kSampleEmptyKey && key < kSampleInfinityKey) {
        draw = draw_in_tile(tile, mine, best);
    } else if (kind.greedy) {
        const int owner = first_lane(lane_key == key);
        draw.place =
            static_cast<uint32_t>(kWarp * owner + first_lane(tile.x[kWarp * owner + tile.lane] == best));
    }
    if (tile.lane == 0 && (kind.greedy || kind.by_tiles)) {
        put_words(words.best, key, draw.place, draw.sum);
    }
}

struct Choice {
    int32_t token = -1;
    SampleError error = SampleError::kNone;
    SampleMade made = SampleMade::kUnknown;
};

// By one thread. log_sum: of the raw logits' exponentials, where log-probabilities are wanted.
__device__ inline void finish_row(const SampleTile& tile, Choice choice, double log_sum) {
    const SampleCudaArgs& args = tile.args;
    const SampleSlot& slot = tile.slot;
    SampleRowResult& result = args.results[tile.row];
    const bool failed = choice.error != SampleError::kNone;
    if (!failed && stops_early(slot, choice.token)) {
        choice.token = slot.forced_after;
        choice.made = SampleMade::kUnknown;
    }
    result.token = failed ? -1 : choice.token;
    result.error = choice.error;
    result.logprob = 0;
    if (failed || slot.logprobs == 0) {
        result.top_count = 0;
    } else {
        const float logit = args.logits[tile.row * args.logits_stride + choice.token];
        result.logprob = static_cast<float>(static_cast<double>(logit) - log_sum);
    }
    if (!failed) {
        append_output(args, slot, tile.slot.id, choice.token, choice.made);
    }
}

}  // namespace tessera::cuda

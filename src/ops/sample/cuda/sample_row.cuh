// One row's arithmetic on the device: the float32 operations of sample_common.h, one by one.
#pragma once

#include <cstdint>

#include "ops/common/cuda/order.cuh"
#include "ops/common/cuda/reduce.cuh"
#include "ops/sample/cuda/sample_cuda.h"
#include "ops/sample/sample_weight.h"

namespace tessera::cuda {

__device__ __forceinline__ float minus_infinity() {
    return __int_as_float(0xFF800000);
}
inline constexpr float kSampleLogitMax = 3.40282347e+38f;

__device__ __forceinline__ bool is_greedy(const SampleSlot& slot) {
    return slot.temperature < 1e-5f;
}

__device__ __forceinline__ bool masks_stops(const SampleSlot& slot) {
    return slot.outputs < slot.min_tokens && slot.stop_count > 0;
}

__device__ __forceinline__ bool has_forced(const SampleSlot& slot) {
    return slot.forced_next >= 0 && slot.forced_next < slot.forced_count;
}

__device__ __forceinline__ float biased(float x, float bias) {
    const float sum = __fadd_rn(x, bias);
    return kSampleLogitMax < sum ? kSampleLogitMax : sum;
}

// A slot's penalties.
class Penalties {
  public:
    Penalties() = default;
    __device__ explicit Penalties(const SampleSlot& slot) {
        repetition_ = slot.repetition_penalty;
        inverse_ = __frcp_rn(repetition_);
        frequency_ = slot.frequency_penalty;
        presence_ = slot.presence_penalty;
        usual_ = kLeast < repetition_ && repetition_ < kMost;
    }

    // count: how often it was made. Of a token that was neither in the prompt nor made: what it was.
    __device__ __forceinline__ float operator()(float x, bool in_prompt, int32_t count) const {
        const bool seen = in_prompt || count > 0;
        const float by = __fmul_rn(x, repetition_);
        x = seen ? (x > 0 ? quotient(x) : by) : x;
        const float less =
            __fsub_rn(__fsub_rn(x, __fmul_rn(frequency_, static_cast<float>(count))), presence_);
        x = count > 0 ? less : x;
        return kSampleLogitMax < x ? kSampleLogitMax : x;
    }

  private:
    static constexpr float kLeast = 0x1p-20f;
    static constexpr float kMost = 0x1p20f;

    // x / repetition_, correctly rounded: where nothing overflows or is denormal, by one step of correction
    // from the product with the rounded inverse (Markstein, 1990). REQUIRES: x > 0, or the answer is not
    // used.
    __device__ __forceinline__ float quotient(float x) const {
        const float q = __fmul_rn(x, inverse_);
        const float near = __fmaf_rn(__fmaf_rn(-q, repetition_, x), inverse_, q);
        return usual_ && 0x1p-60f < x && x < 0x1p60f ? near : __fdiv_rn(x, repetition_);
    }

    float repetition_ = 1, inverse_ = 1, frequency_ = 0, presence_ = 0;
    bool usual_ = true;
};

// The weights of sample_weight.h on the device.
class RowWeights {
    using C = SampleWeightConstants;

  public:
    RowWeights() = default;
    __device__ explicit RowWeights(const SampleSlot& slot) {
        rate_ = __fdiv_rn(C::kLog2E, slot.temperature);
        lowest_ = __fdiv_rn(C::kLowest, rate_);
        tile_lowest_ = __fdiv_rn(C::kTileLowest, rate_);
        least_ = __fmul_rn(slot.min_p, static_cast<float>(1 << C::kBits));
    }

    __device__ __forceinline__ uint32_t operator()(float x, float best) const {
        return __float2uint_rn(unrounded(x, best));
    }
    // 0 where min_p drops the token.
    __device__ __forceinline__ uint32_t kept(float x, float best) const {
        const float weight = unrounded(x, best);
        return weight < least_ ? 0u : __float2uint_rn(weight);
    }
    __device__ __forceinline__ uint64_t tile_mass(uint64_t sum, float tile_best, float best) const {
        const float t = fmaxf(__fsub_rn(tile_best, best), tile_lowest_);
        const float shifted = fmaf(t, rate_, C::kRound);
        const float n = __fsub_rn(shifted, C::kRound);
        const uint64_t mantissa = __float2uint_rn(__fmul_rn(power(fmaf(t, rate_, -n)), C::kMantissa));
        return sum * mantissa >> (24 - C::kTileBits - static_cast<int>(n));
    }
    // No token below it has a weight that min_p keeps.
    __device__ __forceinline__ float least_logit(float best, float min_p) const {
        const float powers = fmaxf(log2f(min_p), C::kLowest) - 1e-3f;
        const float least = best + powers / rate_;
        return least - 1e-6f * (fabsf(least) + fabsf(best));
    }

  private:
    __device__ __forceinline__ static float power(float r) {
        constexpr float k0 = C::kPoly[0], k1 = C::kPoly[1], k2 = C::kPoly[2];
        constexpr float k3 = C::kPoly[3], k4 = C::kPoly[4];
        static_assert(C::kDegree == 4);
        return fmaf(fmaf(fmaf(fmaf(k4, r, k3), r, k2), r, k1), r, k0);
    }
    __device__ __forceinline__ float unrounded(float x, float best) const {
        constexpr float kShiftedZero = C::kRound + C::kBits;
        const float t = fmaxf(__fsub_rn(x, best), lowest_);
        const float shifted = fmaf(t, rate_, kShiftedZero);
        const float p = power(fmaf(t, rate_, -__fsub_rn(shifted, kShiftedZero)));
        return __uint_as_float(__float_as_uint(p) + (__float_as_uint(shifted) << 23));
    }

    float rate_ = 0, lowest_ = 0, tile_lowest_ = 0, least_ = 0;
};

// Fractions of 2^64: the bits of Philox4x32-10 (Salmon et al., 2011) keyed by the seed, counted by the
// position.
struct SampleFractions {
    uint64_t whole = 0;
    uint64_t tile = 0;
};
__device__ inline SampleFractions draw_fractions(const SampleSlot& slot) {
    const auto position = static_cast<uint64_t>(slot.outputs);
    uint32_t c0 = static_cast<uint32_t>(position), c1 = static_cast<uint32_t>(position >> 32), c2 = 0, c3 = 0;
    uint32_t k0 = static_cast<uint32_t>(slot.seed), k1 = static_cast<uint32_t>(slot.seed >> 32);
    for (int round = 0; round < 10; ++round) {
        const uint64_t a = uint64_t{0xD2511F53} * c0;
        const uint64_t b = uint64_t{0xCD9E8D57} * c2;
        c0 = static_cast<uint32_t>(b >> 32) ^ c1 ^ k0;
        c1 = static_cast<uint32_t>(b);
        c2 = static_cast<uint32_t>(a >> 32) ^ c3 ^ k1;
        c3 = static_cast<uint32_t>(a);
        k0 += 0x9E3779B9;
        k1 += 0xBB67AE85;
    }
    return {uint64_t{c1} << 32 | c0, uint64_t{c3} << 32 | c2};
}

// Loads that stay where they stand.
__device__ __forceinline__ int32_t load_id(const int32_t* from) {
    int32_t id;
    asm volatile("ld.global.cg.s32 %0, [%1];" : "=r"(id) : "l"(from));
    return id;
}
__device__ __forceinline__ uint32_t load_word(const uint32_t* from) {
    uint32_t word;
    asm volatile("ld.global.cg.u32 %0, [%1];" : "=r"(word) : "l"(from));
    return word;
}

// What a lane carries of a slot that its warp brings into shared memory, past the first-level cache.
struct SlotWords {
    static constexpr int kWords = sizeof(SampleSlot) / 8;
    static_assert(sizeof(SampleSlot) % 8 == 0 && kWords <= 2 * kWarp);

    uint64_t low = 0;
    uint64_t high = 0;

    __device__ __forceinline__ void load(const SampleSlot* slot, int lane) {
        const auto* from = reinterpret_cast<const uint64_t*>(slot);
        low = __ldcg(from + lane);
        high = lane + kWarp < kWords ? __ldcg(from + lane + kWarp) : 0;
    }
    __device__ __forceinline__ void store(SampleSlot& slot, int lane) const {
        auto* to = reinterpret_cast<uint64_t*>(&slot);
        to[lane] = low;
        if (lane + kWarp < kWords) {
            to[lane + kWarp] = high;
        }
    }
};

// Of a row.
inline int64_t tiles_of(int64_t vocab) {
    return (vocab + kSampleTile - 1) / kSampleTile;
}

// exp(x - best) for log-probabilities, in units of 2^-52: a sum of whole numbers has the same bits in any
// order, and so a row in any batch. best: at least x; up to 1,024 of them fit one sum.
__device__ __forceinline__ uint64_t exp_below(float x, float best) {
    return __float2ull_rn(exp2f((x - best) * SampleWeightConstants::kLog2E) * 0x1p52f);
}
// As SampleTileWords::raw has it.
__device__ __forceinline__ uint64_t exp_sum_word(uint64_t sum) {
    return static_cast<uint64_t>(__double_as_longlong(static_cast<double>(sum) * 0x1p-52));
}

// What a row asks for.
struct SampleKind {
    int32_t top_k = 0;      // 0: cuts nothing
    bool greedy = false;    // the best token is wanted, or none
    bool by_tiles = false;  // neither top_k nor min_p cuts: tiles tell their sums
    bool cut = false;       // something cuts
    bool named = false;     // by the mask, stop ids or biases logits are changed
    bool edited = false;    // by these or by penalties

    SampleKind() = default;
    __device__ SampleKind(const SampleCudaArgs& args, const SampleSlot& slot) {
        top_k = slot.top_k > 0 && slot.top_k < args.vocab ? slot.top_k : 0;
        // Without branches: each would wait for the slot's fields anew.
        const bool forced = (slot.forced_next >= 0) & (slot.forced_next < slot.forced_count);
        const bool masks = (slot.outputs < slot.min_tokens) & (slot.stop_count > 0);
        const bool penalties =
            (slot.repetition_penalty != 1) | (slot.presence_penalty != 0) | (slot.frequency_penalty != 0);
        greedy = is_greedy(slot) | forced;
        by_tiles = !greedy & (top_k == 0) & (slot.min_p <= 0);
        cut = !greedy & (!by_tiles | (slot.top_p < 1));
        named = (slot.bias_count > 0) | masks | (args.allowed != nullptr);
        edited = named | penalties;
    }
};

// A row's slot, and where it is not greedy what its draws are made with.
struct SampleRowSlot : SampleSlot {
    alignas(8) int32_t id = 0;  // < 0: padding. Not among the words that SlotWords stores
    SampleKind kind;
    RowWeights weigh;
    SampleFractions fractions;
};

__device__ __forceinline__ int32_t forced_token(const SampleCudaArgs& args, const SampleSlot& slot,
                                                int32_t slot_id) {
    if (!has_forced(slot)) {
        return -1;
    }
    return args.slots.forced[static_cast<int64_t>(slot_id) * kSampleForcedMax + slot.forced_next];
}

// A stop token while `forced_after` is awaited would end the request before the forced tokens come.
__device__ __forceinline__ bool stops_early(const SampleSlot& slot, int32_t token) {
    bool stop = false;
    for (int32_t i = 0; slot.forced_next < 0 && i < slot.stop_count; ++i) {
        stop = stop || slot.stop_ids[i] == token;
    }
    return stop;
}

// Whether a token was made before.
enum class SampleMade : uint8_t { kNever, kBefore, kUnknown };

// Counts an output of a slot with penalties. What is known saves a trip to memory.
__device__ inline void count_output(const SampleSlots& slots, int64_t vocab, int32_t slot_id, int32_t token,
                                    SampleMade made = SampleMade::kUnknown) {
    const int64_t word = slot_id * ((vocab + 63) / 64) + token / 64;
    int32_t* const count = slots.output_counts + slot_id * vocab + token;
    bool before = made == SampleMade::kBefore;
    if (made == SampleMade::kUnknown) {
        before = atomicAdd(count, 1) > 0;
    } else {
        atomicAdd(count, 1);
    }
    uint64_t* const bits = before ? slots.output_often : slots.output_seen;
    atomicOr(reinterpret_cast<unsigned long long*>(bits) + word, 1ull << (token % 64));
}

// Takes the token into the slot's state. `slot`: as it was.
__device__ inline void append_output(const SampleCudaArgs& args, const SampleSlot& slot, int32_t slot_id,
                                     int32_t token, SampleMade made = SampleMade::kUnknown) {
    SampleSlot& next = args.slots.slot[slot_id];
    next.outputs = slot.outputs + 1;
    if (slot.forced_next < 0) {
        next.forced_next = token == slot.forced_after ? 0 : -1;
    } else if (slot.forced_next < slot.forced_count) {
        next.forced_next = slot.forced_next + 1;
    }
    if (args.slots.last_token != nullptr) {
        args.slots.last_token[slot_id] = token;
    }
    if (slot.has_penalties()) {
        count_output(args.slots, args.vocab, slot_id, token, made);
    }
}

}  // namespace tessera::cuda

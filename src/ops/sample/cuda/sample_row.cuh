// One row's arithmetic on the device: the float32 operations of sample_common.h, one by one.
#pragma once

#include <cstdint>

#include "ops/common/cuda/exp.cuh"
#include "ops/common/cuda/order.cuh"
#include "ops/sample/cuda/sample_cuda.h"

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

__device__ __forceinline__ float biased(float x, float bias) {
    const float sum = __fadd_rn(x, bias);
    return kSampleLogitMax < sum ? kSampleLogitMax : sum;
}

__device__ __forceinline__ float penalised(float x, bool in_prompt, int32_t count, const SampleSlot& slot) {
    if (slot.repetition_penalty != 1 && (in_prompt || count > 0)) {
        x = x > 0 ? __fdiv_rn(x, slot.repetition_penalty) : __fmul_rn(x, slot.repetition_penalty);
    }
    if (count > 0) {
        x = __fsub_rn(x, __fmul_rn(slot.frequency_penalty, static_cast<float>(count)));
        x = __fsub_rn(x, slot.presence_penalty);
    }
    return kSampleLogitMax < x ? kSampleLogitMax : x;
}

// A row's temperature. REQUIRES of reciprocal: 1 / temperature, rounded to nearest.
struct SampleScale {
    float temperature = 1;
    float reciprocal = 1;

    // x / temperature, rounded to nearest: with the rounded reciprocal z of the divisor t one correction of
    // q = x z, q + (x - q t) z, gives the rounded quotient (Brisebarre, Muller and Raina, 2004) as long as
    // nothing underflows. Outside of a wide range it is divided.
    __device__ __forceinline__ float ordinary(float x) const {
        const float q = __fmul_rn(x, reciprocal);
        return fmaf(fmaf(-temperature, q, x), reciprocal, q);
    }
    __device__ __forceinline__ float operator()(float x) const {
        if (is_ordinary(fabsf(x), fabsf(x))) {
            return ordinary(x);
        }
        const float scaled = __fdiv_rn(x, temperature);
        return kSampleLogitMax < scaled ? kSampleLogitMax : scaled;
    }
    // Decided for all four at once, so that their chains of operations overlap.
    __device__ __forceinline__ float4 operator()(const float4& x) const {
        const float smallest = fminf(fminf(fabsf(x.x), fabsf(x.y)), fminf(fabsf(x.z), fabsf(x.w)));
        const float largest = fmaxf(fmaxf(fabsf(x.x), fabsf(x.y)), fmaxf(fabsf(x.z), fabsf(x.w)));
        if (is_ordinary(smallest, largest)) {
            return make_float4(ordinary(x.x), ordinary(x.y), ordinary(x.z), ordinary(x.w));
        }
        return make_float4((*this)(x.x), (*this)(x.y), (*this)(x.z), (*this)(x.w));
    }
    __device__ __forceinline__ static bool is_ordinary(float smallest, float largest) {
        return smallest > 1e-18f && largest < 1e18f;
    }
};

// The integer weights of a row's tokens: round(2^30 exp(x - max)), 0 where min_p drops the token.
struct SampleWeights {
    SampleScale scale;
    float max = 0;    // the largest scaled logit
    float least = 0;  // 2^30 min_p
    float cut = 0;    // logits below it, before the temperature, weigh nothing

    __device__ SampleWeights(const SampleScale& row_scale, float largest, float min_p) : scale(row_scale) {
        max = scale(largest);
        least = __fmul_rn(min_p, 1073741824.0f);
        // exp(-21.5) 2^30 < 0.5; the rest covers the rounding.
        cut = fabsf(max) < 1e6f ? (max - 23.0f) * scale.temperature : minus_infinity();
    }
    // Of a scaled logit. The operations of exp_f32(); 2^n and 2^30 go into the exponent at once.
    __device__ __forceinline__ uint32_t of_scaled(float x) const {
        using C = ExpConstants;
        const float d = fmaxf(__fsub_rn(x, max), -32.0f);
        const float shifted = fmaf(d, C::kLog2E, C::kRound);
        const float n = __fsub_rn(shifted, C::kRound);
        const float r = fmaf(n, -C::kLn2Low, fmaf(n, -C::kLn2High, d));
        constexpr float k0 = C::kPoly[0], k1 = C::kPoly[1], k2 = C::kPoly[2], k3 = C::kPoly[3];
        constexpr float k4 = C::kPoly[4], k5 = C::kPoly[5], k6 = C::kPoly[6], k7 = C::kPoly[7];
        float p = fmaf(fmaf(k7, r, k6), r, k5);
        p = fmaf(fmaf(fmaf(p, r, k4), r, k3), r, k2);
        p = fmaf(fmaf(p, r, k1), r, k0);
        p = __uint_as_float(__float_as_uint(p) + (__float_as_uint(shifted) << 23) + (30u << 23));
        return p < least ? 0u : static_cast<uint32_t>(__float2int_rn(p));
    }
    // Of four logits, into `weights`; false: all are 0.
    __device__ __forceinline__ bool of_four(const float4& x, uint32_t (&weights)[4]) const {
        if (fmaxf(fmaxf(x.x, x.y), fmaxf(x.z, x.w)) < cut) {
            weights[0] = weights[1] = weights[2] = weights[3] = 0;
            return false;
        }
        const float4 scaled = scale(x);
        weights[0] = of_scaled(scaled.x);
        weights[1] = of_scaled(scaled.y);
        weights[2] = of_scaled(scaled.z);
        weights[3] = of_scaled(scaled.w);
        return true;
    }
};

// A fraction of 2^64: 64 bits of Philox4x32-10 (Salmon et al., 2011) keyed by the seed, counted by the
// position.
__device__ inline uint64_t draw_fraction(uint64_t seed, uint64_t position) {
    uint32_t c0 = static_cast<uint32_t>(position), c1 = static_cast<uint32_t>(position >> 32), c2 = 0, c3 = 0;
    uint32_t k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
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
    return uint64_t{c1} << 32 | c0;
}

__device__ __forceinline__ int32_t forced_token(const SampleCudaArgs& args, const SampleSlot& slot,
                                                int32_t slot_id) {
    if (slot.forced_next < 0 || slot.forced_next >= slot.forced_count) {
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

// Takes the token into the slot's state. `slot`: as it was.
__device__ inline void append_output(const SampleCudaArgs& args, const SampleSlot& slot, int32_t slot_id,
                                     int32_t token) {
    if (slot.has_penalties()) {
        const int64_t word = slot_id * ((args.vocab + 63) / 64) + token / 64;
        atomicAdd(args.slots.output_counts + slot_id * args.vocab + token, 1);
        atomicOr(reinterpret_cast<unsigned long long*>(args.slots.output_seen) + word, 1ull << (token % 64));
    }
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
}

}  // namespace tessera::cuda

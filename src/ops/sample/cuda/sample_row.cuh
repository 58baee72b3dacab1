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

// Whether the row's choice reads anything but its logits.
__device__ __forceinline__ bool has_edits(const SampleCudaArgs& args, const SampleSlot& slot) {
    return args.allowed != nullptr || slot.bias_count > 0 || slot.has_penalties() || masks_stops(slot);
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

__device__ __forceinline__ float scaled_logit(float x, float temperature) {
    const float scaled = __fdiv_rn(x, temperature);
    return kSampleLogitMax < scaled ? kSampleLogitMax : scaled;
}

// round(2^30 exp(x - max)); 0 where min_p drops the token.
__device__ __forceinline__ uint32_t token_weight(float x, float max, float min_p) {
    const float p = cuda::exp_f32(__fsub_rn(x, max));
    return p < min_p ? 0u : static_cast<uint32_t>(__float2int_rn(__fmul_rn(p, 1073741824.0f)));
}

// A point in [0, total): 64 bits of Philox4x32-10 (Salmon et al., 2011) keyed by the seed, counted by the
// position.
__device__ inline uint64_t draw_point(uint64_t seed, uint64_t position, uint64_t total) {
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
    return __umul64hi(uint64_t{c1} << 32 | c0, total);
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

// Takes the token into the slot's state.
__device__ inline void append_output(const SampleCudaArgs& args, SampleSlot& slot, int32_t slot_id,
                                     int32_t token) {
    if (slot.has_penalties()) {
        ++args.slots.output_counts[slot_id * args.vocab + token];
        args.slots.output_seen[slot_id * ((args.vocab + 63) / 64) + token / 64] |= uint64_t{1}
                                                                                   << (token % 64);
    }
    ++slot.outputs;
    if (slot.forced_next < 0) {
        slot.forced_next = token == slot.forced_after ? 0 : -1;
    } else if (slot.forced_next < slot.forced_count) {
        ++slot.forced_next;
    }
    if (args.slots.last_token != nullptr) {
        args.slots.last_token[slot_id] = token;
    }
}

}  // namespace tessera::cuda

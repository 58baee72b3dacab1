// What the two kernels of the sampler share: the workspace, and the float32 operations of sample_common.h one
// by one.
#pragma once

#include <cstdint>

#include "ops/common/cuda/exp.cuh"
#include "ops/common/cuda/order.cuh"
#include "ops/sample/cuda/sample_cuda.h"

namespace tessera::cuda {

inline constexpr int kSampleParts = 32;  // pieces of a row in the first kernel

// What the first kernel finds in one piece of a row.
struct SamplePart {
    uint64_t best = 0;      // ranked() of the best token after the edits
    uint64_t raw_best = 0;  // and before them
    double raw_sum = 0;     // of exp(logit - the piece's own best), where log-probabilities are asked for
    int32_t not_finite = 0;
    uint64_t top[kSampleTopMax] = {};  // ranked() of the best raw logits, where asked for; 0 = none
};

// The workspace of all rows. `edited` is the row after the edits; the choosing kernel then keeps the tokens
// that have a weight there as ordered_bits(), piece by piece, beside their ids and weights.
struct SampleScratch {
    SamplePart* parts = nullptr;  // [rows][kSampleParts]
    uint32_t* edited = nullptr;   // [rows][vocab] float32 bits, or ordered_bits()
    int32_t* ids = nullptr;       // [rows][vocab]
    uint32_t* weights = nullptr;  // [rows][vocab]

    // `memory` may be null, to learn `bytes`.
    static SampleScratch at(std::byte* memory, int64_t vocab, int64_t rows, int64_t* bytes) {
        const int64_t parts_bytes = rows * kSampleParts * static_cast<int64_t>(sizeof(SamplePart));
        const int64_t row_bytes = rows * vocab * 4;
        if (bytes != nullptr) {
            *bytes = parts_bytes + 3 * row_bytes;
        }
        SampleScratch scratch;
        if (memory != nullptr) {
            scratch.parts = reinterpret_cast<SamplePart*>(memory);
            scratch.edited = reinterpret_cast<uint32_t*>(memory + parts_bytes);
            scratch.ids = reinterpret_cast<int32_t*>(memory + parts_bytes + row_bytes);
            scratch.weights = reinterpret_cast<uint32_t*>(memory + parts_bytes + 2 * row_bytes);
        }
        return scratch;
    }
};

__device__ __forceinline__ float minus_infinity() {
    return __int_as_float(0xFF800000);
}
inline constexpr float kSampleLogitMax = 3.40282347e+38f;

__device__ __forceinline__ bool is_greedy(const SampleSlot& slot) {
    return slot.temperature < 1e-5f;
}

// Whether the row's choice reads anything but its logits.
__device__ __forceinline__ bool has_edits(const SampleCudaArgs& args, const SampleSlot& slot) {
    return args.allowed != nullptr || slot.bias_count > 0 || slot.has_penalties() ||
           (slot.outputs < slot.min_tokens && slot.stop_count > 0);
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

}  // namespace tessera::cuda

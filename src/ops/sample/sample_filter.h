// top_k and top_p without sorting the vocabulary, and the draw: the scalar half of the fast sampler. Private
// to this operator.
#pragma once

#include <cstddef>
#include <cstdint>

#include "ops/sample/sample.h"

namespace tessera {

inline constexpr int64_t kSampleBlock = 1024;
// Buckets of equal width over the logits that have a weight: those within ln(2^31) = 21.5 of the best.
inline constexpr int32_t kSampleBuckets = 4096;
inline constexpr float kSampleBucketScale = static_cast<float>(kSampleBuckets - 2) / 21.6f;

// One thread's memory, for one row at a time.
struct SampleMemory {
    int64_t vocab = 0;
    int64_t padded = 0;               // vocab rounded up to 16
    float* x = nullptr;               // [padded]
    int32_t* weights = nullptr;       // [padded]
    int32_t* buckets = nullptr;       // [padded]
    uint64_t* block_sums = nullptr;   // [ceil(padded / kSampleBlock)] of the weights
    uint64_t* bucket_mass = nullptr;  // [kSampleBuckets]
    int32_t* bucket_count = nullptr;  // [kSampleBuckets]
    int32_t* candidates = nullptr;    // [padded]

    // With null memory, only *bytes is set.
    static SampleMemory at(std::byte* memory, int64_t vocab, int64_t* bytes = nullptr);
};

// A token is kept if its scaled logit is above `logit`, or equal to it and its id at most `id`.
struct SampleCut {
    float logit = 0;
    int32_t id = 0;
};

// REQUIRES: x, weights and buckets are set.
SampleCut find_cut(const SampleRowArgs& row, const SampleMemory& memory);
// REQUIRES: weights and block_sums are set, and not all are 0.
int32_t draw_token(const SampleRowArgs& row, const SampleMemory& memory);

}  // namespace tessera

// top_k and top_p without sorting the vocabulary, and the draw: the scalar half of the fast sampler. Private
// to this operator.
#pragma once

#include <cstddef>
#include <cstdint>

#include "ops/sample/sample.h"
#include "ops/sample/sample_weight.h"

namespace tessera {

// Buckets of equal width over the logits that have a weight: those within 2^27 of the best.
inline constexpr int32_t kSampleBuckets = 4096;
inline constexpr float kSampleBucketScale = static_cast<float>(kSampleBuckets - 2) / 27.1f;

// One thread's memory, for one row at a time.
struct SampleMemory {
    int64_t vocab = 0;
    int64_t padded = 0;               // vocab rounded up to 16
    float* x = nullptr;               // [padded]
    int32_t* weights = nullptr;       // [padded]
    int32_t* buckets = nullptr;       // [padded]
    uint64_t* tile_sums = nullptr;    // [tiles()] of the weights; for draw_by_tiles() of the runs' masses
    float* tile_best = nullptr;       // [tiles()] where they are relative to it
    uint64_t* bucket_mass = nullptr;  // [kSampleBuckets]
    int32_t* bucket_count = nullptr;  // [kSampleBuckets]
    int32_t* candidates = nullptr;    // [padded]

    int64_t tiles() const { return (padded + kSampleTile - 1) / kSampleTile; }

    // With null memory, only *bytes is set.
    static SampleMemory at(std::byte* memory, int64_t vocab, int64_t* bytes = nullptr);
};

// A token is kept if its logit is above `logit`, or equal to it and its id at most `id`.
struct SampleCut {
    float logit = 0;
    int32_t id = 0;
};

// REQUIRES: x, weights and buckets are set. whole: what top_p is a share of; 0: the mass that top_k leaves.
SampleCut find_cut(const SampleRowArgs& row, const SampleMemory& memory, double whole);
// REQUIRES: weights and tile_sums are set, and not all are 0.
int32_t draw_token(const SampleRowArgs& row, const SampleMemory& memory);

// The mass of all tiles into `masses`; their sum. REQUIRES: tile_sums and tile_best are set; max: the
// largest.
uint64_t tile_masses(const SampleRowArgs& row, const SampleMemory& memory, float max, uint64_t* masses);
// The mass of a tile's runs, as weights of their tokens.
uint64_t sum_of_runs(const int32_t* weights, int64_t count);
// REQUIRES: the same, and weights.
int32_t draw_by_tiles(const SampleRowArgs& row, const SampleMemory& memory, float max);

}  // namespace tessera

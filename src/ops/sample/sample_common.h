// What the reference and the fast version of sample share. Private to this operator.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <limits>

#include "ops/sample/sample.h"
#include "ops/sample/sample_weight.h"

namespace tessera {

inline constexpr float kGreedyTemperature = 1e-5f;  // below it vLLM takes the best token
inline constexpr float kMinusInf = -std::numeric_limits<float>::infinity();
inline constexpr float kLogitMax = std::numeric_limits<float>::max();

// Philox4x32-10 (Salmon et al., 2011): 128 random bits for a counter under a key.
inline std::array<uint32_t, 4> philox(std::array<uint32_t, 4> counter, std::array<uint32_t, 2> key) {
    for (int round = 0; round < 10; ++round) {
        const uint64_t a = uint64_t{0xD2511F53} * counter[0];
        const uint64_t b = uint64_t{0xCD9E8D57} * counter[2];
        counter = {static_cast<uint32_t>(b >> 32) ^ counter[1] ^ key[0], static_cast<uint32_t>(b),
                   static_cast<uint32_t>(a >> 32) ^ counter[3] ^ key[1], static_cast<uint32_t>(a)};
        key[0] += 0x9E3779B9;
        key[1] += 0xBB67AE85;
    }
    return counter;
}

// The row's own random bits, as fractions: 64 bits of the mass of the whole; 32 of a tile's runs, and 32 of
// the tokens of a run.
struct DrawFractions {
    uint64_t whole = 0;
    uint64_t tile = 0;
};
inline DrawFractions draw_fractions(const SampleRowArgs& row) {
    const std::array<uint32_t, 4> bits =
        philox({static_cast<uint32_t>(row.position), static_cast<uint32_t>(row.position >> 32), 0, 0},
               {static_cast<uint32_t>(row.seed), static_cast<uint32_t>(row.seed >> 32)});
    return {uint64_t{bits[1]} << 32 | bits[0], uint64_t{bits[3]} << 32 | bits[2]};
}
inline uint32_t fraction_of_run(uint64_t tile) {
    return static_cast<uint32_t>(tile >> 32);
}
inline uint32_t fraction_of_token(uint64_t tile) {
    return static_cast<uint32_t>(tile);
}
// A point in [0, total). REQUIRES: 0 < total.
inline uint32_t draw_point(uint32_t fraction, uint32_t total) {
    return static_cast<uint32_t>(uint64_t{fraction} * total >> 32);
}
inline uint64_t draw_point(uint64_t fraction, uint64_t total) {
    return static_cast<uint64_t>((static_cast<unsigned __int128>(fraction) * total) >> 64);
}

inline bool is_greedy(const SampleRowArgs& row) {
    return row.temperature < kGreedyTemperature;
}

// top_k, 0 where it cuts nothing.
inline int32_t top_k_of(const SampleRowArgs& row, int64_t vocab) {
    return row.top_k > 0 && row.top_k < vocab ? row.top_k : 0;
}
// Nothing but top_p cuts: the mass of the whole is the sum of the tiles'.
inline bool sums_tiles(const SampleRowArgs& row, int64_t vocab) {
    return top_k_of(row, vocab) == 0 && row.min_p <= 0;
}
inline double whole_of_tiles(uint64_t mass) {
    return static_cast<double>(mass) / (1 << SampleWeightConstants::kTileBits);
}

inline bool bit_is_set(const uint32_t* words, int64_t i) {
    return (words[i / 32] >> (i % 32) & 1) != 0;
}
inline bool bit_is_set(const uint64_t* words, int64_t i) {
    return (words[i / 64] >> (i % 64) & 1) != 0;
}

inline bool has_penalties(const SampleRowArgs& row) {
    return row.repetition_penalty != 1 || row.presence_penalty != 0 || row.frequency_penalty != 0;
}

// The penalties of one token; `count` = how often it has been generated.
inline float penalised(float x, bool in_prompt, int32_t count, const SampleRowArgs& row) {
    if (row.repetition_penalty != 1 && (in_prompt || count > 0)) {
        x = x > 0 ? x / row.repetition_penalty : x * row.repetition_penalty;
    }
    if (count > 0) {
        x -= row.frequency_penalty * static_cast<float>(count);
        x -= row.presence_penalty;
    }
    return std::min(x, kLogitMax);
}

// The edits that name their tokens: masked ids, then biases.
inline void apply_named_edits(const SampleRowArgs& row, int64_t vocab, float* x) {
    for (const int32_t id : row.masked) {
        if (id >= 0 && id < vocab) {
            x[id] = kMinusInf;
        }
    }
    for (const auto& [id, bias] : row.logit_bias) {
        if (id >= 0 && id < vocab) {
            x[id] = std::min(x[id] + bias, kLogitMax);
        }
    }
}

}  // namespace tessera

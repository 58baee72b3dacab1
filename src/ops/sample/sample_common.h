// What the reference and the fast version of sample share. Private to this operator.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdint>
#include <limits>

#include "ops/common/exp.h"
#include "ops/sample/sample.h"

namespace tessera {

inline constexpr float kWeightOne = 1073741824.0f;  // 2^30: the weight of the most probable token
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

// A point in [0, total), from the row's own 64 random bits. REQUIRES: 0 < total < 2^63.
inline uint64_t draw_point(const SampleRowArgs& row, uint64_t total) {
    const std::array<uint32_t, 4> bits =
        philox({static_cast<uint32_t>(row.position), static_cast<uint32_t>(row.position >> 32), 0, 0},
               {static_cast<uint32_t>(row.seed), static_cast<uint32_t>(row.seed >> 32)});
    const uint64_t fraction = uint64_t{bits[1]} << 32 | bits[0];  // of 2^64
    return static_cast<uint64_t>((static_cast<unsigned __int128>(fraction) * total) >> 64);
}

// The integer weight of a token whose scaled logit is x; 0 where min_p drops it.
inline int32_t token_weight(float x, float max, float min_p) {
    const float p = exp_f32(x - max);
    return p < min_p ? 0 : static_cast<int32_t>(std::lrint(p * kWeightOne));
}

inline bool is_greedy(const SampleRowArgs& row) {
    return row.temperature < kGreedyTemperature;
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

// The temperature: a quotient beyond the range of float32 stays finite, so that its weight is defined.
inline float scaled_logit(float x, float temperature) {
    return std::min(x / temperature, kLogitMax);
}

}  // namespace tessera

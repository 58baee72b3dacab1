// SamplingParams: how the next token of a request is chosen. The server validates every field (ranges are
// stated here); below it they are trusted.
#pragma once

#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "types/model_config.h"

namespace tessera {

inline constexpr int32_t kTopLogprobsMax = 20;
inline constexpr int32_t kLogitBiasMax = 1024;
inline constexpr int32_t kStopIdsMax = 64;

// Tokens that the sampler must emit at a given moment: after `after` has been generated, or at once when
// `after` is -1. They are ordinary output tokens (counted, cached, streamed). While waiting for `after`, a
// sampled stop token is replaced by `after`, so that the forced tokens always come. Used by tool_choice
// required and named.
struct ForcedTokens {
    TokenId after = -1;
    std::vector<TokenId> tokens;
};

struct SamplingParams {
    double temperature = 1.0;                           // [0, 2]; 0 = greedy
    int32_t top_k = 0;                                  // 0 = off
    double top_p = 1.0;                                 // (0, 1]
    double min_p = 0.0;                                 // [0, 1]
    double repetition_penalty = 1.0;                    // (0, 2]: over prompt and output
    double presence_penalty = 0.0;                      // [-2, 2]: over output
    double frequency_penalty = 0.0;                     // [-2, 2]: over output
    std::vector<std::pair<TokenId, float>> logit_bias;  // bias in [-100, 100]
    // The draw at output position i depends only on (seed, i) and the distribution.
    uint64_t seed = 0;
    int32_t max_tokens = 1;  // >= 1
    int32_t min_tokens = 0;  // stop ids (and EOS) are masked before this many tokens
    bool ignore_eos = false;
    std::vector<TokenId> stop_ids;  // beside the model's EOS ids
    // Log-probabilities of the raw distribution (before penalties and temperature): none when unset, of the
    // chosen token alone when 0, also of the N most probable tokens when N > 0.
    std::optional<int32_t> logprobs;
    ForcedTokens forced;
};

}  // namespace tessera

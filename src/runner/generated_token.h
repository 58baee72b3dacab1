// A sampler's result as the engine's token, for every runner.
#pragma once

#include "ops/sample/sample.h"
#include "types/token_event.h"

namespace tessera {

// logprobs: whether the request asked for log-probabilities.
inline GeneratedToken generated_token(const SampleRowResult& sampled, bool logprobs) {
    GeneratedToken token;
    token.token = sampled.token;
    if (logprobs) {
        token.logprob = sampled.logprob;
        for (int32_t i = 0; i < sampled.top_count; ++i) {
            const SampleLogprob& entry = sampled.top[static_cast<size_t>(i)];
            token.top.push_back({entry.token, entry.logprob});
        }
    }
    return token;
}

}  // namespace tessera

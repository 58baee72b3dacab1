// Request: one sequence to generate, validated. A client's request with n > 1 or several prompts becomes
// several.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/clock.h"
#include "types/sampling_params.h"

namespace tessera {

using RequestId = uint64_t;  // unique in the engine's life; 0 = none

struct Request {
    RequestId id = 0;
    std::vector<TokenId> prompt;  // >= 1 token, each in [0, vocab_size)
    SamplingParams sampling;
    std::string cache_salt;  // enters the root of the page keys; empty = the shared root
    TimeNs deadline = 0;     // 0 = none; past it the request ends with FinishReason::kDeadline
    int32_t priority = 0;    // lower runs first; ties by arrival
};

}  // namespace tessera

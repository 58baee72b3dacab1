// TokenEvent: what the engine tells about a request, in order; the last one carries the finish reason.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "types/request.h"

namespace tessera {

enum class FinishReason : uint8_t {
    kNone,
    kStop,      // EOS, a stop id, or a stop string (Engine::finish)
    kLength,    // max_tokens or the context is full
    kAbort,     // cancelled by the client or by shutdown
    kDeadline,  // the request's deadline passed
    kError,     // this request failed (for example a NaN in its logits); `error` says why
};

constexpr std::string_view finish_reason_name(FinishReason reason) {
    switch (reason) {
        case FinishReason::kNone:
            return "none";
        case FinishReason::kStop:
            return "stop";
        case FinishReason::kLength:
            return "length";
        case FinishReason::kAbort:
            return "abort";
        case FinishReason::kDeadline:
            return "deadline";
        case FinishReason::kError:
            return "error";
    }
    return "none";
}

struct TokenLogprob {
    TokenId token = 0;
    float logprob = 0;
};

struct GeneratedToken {
    TokenId token = 0;
    float logprob = 0;              // set when the request asks for log-probabilities
    std::vector<TokenLogprob> top;  // most probable first
};

struct TokenEvent {
    RequestId id = 0;
    std::vector<GeneratedToken> tokens;  // includes the stop token that ended the request, if one did
    FinishReason finish = FinishReason::kNone;
    TokenId stop_token = -1;  // the id that ended it, when finish is kStop by an id
    std::string error;        // when finish is kError
    int32_t prompt_tokens = 0;
    int32_t cached_tokens = 0;  // prompt tokens taken from the prefix cache
    TimeNs scheduled = 0;       // when it first got a slot; 0 = never
    TimeNs time = 0;            // when the step that made it was collected
};

}  // namespace tessera

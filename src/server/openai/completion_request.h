// POST /v1/completions: JSON -> a validated request.
#pragma once

#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "server/openai/sampling.h"

namespace tessera {

using TextOrIds = std::variant<std::string, std::vector<TokenId>>;

struct CompletionRequest {
    std::vector<TextOrIds> prompts;  // at least one
    CommonFields common;
    std::optional<int32_t> logprobs;
};

// Returns the error, or nothing when `out` is valid. `body` must be an object.
std::optional<ApiError> parse_completion_request(const json::Value& body, const OpenAiConfig& config,
                                                 CompletionRequest& out);

}  // namespace tessera

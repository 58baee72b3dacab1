// POST /v1/chat/completions (and the chat form of /tokenize): JSON -> a validated request.
#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "server/openai/sampling.h"
#include "text/hy3_format.h"

namespace tessera {

enum class ToolChoice { kAuto, kNone, kRequired, kNamed };

// What makes the prompt.
struct ChatPrompt {
    ChatInput input;
    bool has_tools = false;
};

struct ChatRequest {
    ChatPrompt prompt;
    CommonFields common;
    std::optional<int32_t> logprobs;  // top_logprobs; absent unless `logprobs` is true
    ToolChoice tool_choice = ToolChoice::kAuto;
    std::string tool_name;  // of kNamed
    bool parallel_tool_calls = true;
};

// OpenAI's levels in the model's terms: none and minimal switch reasoning off; medium rounds up to high,
// since a client that asks for it expects reasoning of some depth. Nothing for an unknown level.
std::optional<std::string> model_reasoning_effort(std::string_view effort);

// Both return the error, or nothing when `out` is valid. `body` must be an object.
std::optional<ApiError> parse_chat_request(const json::Value& body, const OpenAiConfig& config,
                                           ChatRequest& out);
std::optional<ApiError> parse_chat_prompt(const json::Value& body, const OpenAiConfig& config,
                                          ChatPrompt& out);

}  // namespace tessera

// The Hy3 conversation format: messages -> prompt text, byte-equal to the published chat template
// (reference: tests/golden/data/template.jsonl). The folder's chat_template is never executed.
#pragma once

#include <optional>
#include <string>
#include <string_view>

#include "base/json.h"
#include "base/status.h"

namespace tessera {

// The template's variables. An absent JSON value ("undefined") differs from null.
struct ChatInput {
    json::Value messages;  // array of message objects in OpenAI's wire form
    std::optional<json::Value> tools;
    json::Value kwargs =
        json::Value::object();  // reasoning_effort, add_generation_prompt, preserved_thinking, ...
};

// The prompt text, or invalid_argument with the template's own error text.
Result<std::string> render_chat(const ChatInput& input, std::string_view suffix);

// Where the model's output begins: decided by the prompt's tail, it sets the parser's first state.
enum class OutputStart { kContent, kReasoning };

struct Hy3Tokens {
    explicit Hy3Tokens(std::string_view suffix);
    std::string bos, eos, user, assistant, reasoning_mode;
    std::string think_begin, think_end;
    std::string tool_calls_begin, tool_calls_end, tool_call_begin, tool_call_end, tool_sep;
    std::string arg_key_begin, arg_key_end, arg_value_begin, arg_value_end;
};

// kReasoning when the prompt ends inside an open think tag.
OutputStart output_start(std::string_view prompt, std::string_view suffix);

}  // namespace tessera

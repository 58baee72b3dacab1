// POST /tokenize (text and chat form) and /detokenize, as vLLM has them. Private to the server layer.
#pragma once

#include <memory>

#include "server/openai/context.h"
#include "server/openai/error.h"

namespace tessera {

// The body as a JSON object, or the answered error.
std::optional<json::Value> read_body(HttpExchange& exchange);

void handle_tokenize(const OpenAiService::Context& context, HttpExchange& exchange);
void handle_detokenize(const OpenAiService::Context& context, HttpExchange& exchange);

}  // namespace tessera

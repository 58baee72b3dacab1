// Validation of a conversation: every message, content part, tool call and tool, with errors that name the
// place.
#pragma once

#include "server/openai/fields.h"
#include "server/openai_service.h"

namespace tessera {

// The messages as the conversation format takes them: known keys only, `developer` turned into `system`,
// empty arguments into "{}". Fails on `reader`.
json::Value read_messages(FieldReader& reader, const OpenAiLimits& limits);

// The tools array as given (it is rendered whole), or null when absent or empty.
const json::Value* read_tools(FieldReader& reader, const OpenAiLimits& limits);

}  // namespace tessera

// Readers for the fields that the parts of a tokenizer.json share.
#pragma once

#include <string>
#include <string_view>

#include "base/json.h"
#include "base/status.h"
#include "text/bpe/regex.h"

namespace tessera::bpe {

// The field "type", or empty.
std::string spec_type(const json::Value& spec);
// A field that may be absent.
std::string spec_string(const json::Value& spec, std::string_view key);
bool spec_bool(const json::Value& spec, std::string_view key, bool otherwise);
// The field "pattern": {"Regex": ...} or {"String": ...}.
Result<Regex> spec_pattern(const json::Value& spec);

}  // namespace tessera::bpe

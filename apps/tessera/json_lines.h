// The form that `tessera tokenize` and `tessera render` share: one JSON object a line in, one a line out, in
// order.
#pragma once

#include <functional>

#include "base/json.h"
#include "base/status.h"

namespace tessera {

// Answers each line of standard input with answer()'s object, or with {"error": text} for an error or a line
// that is no JSON object. Empty lines are passed over. False when standard output cannot be written.
bool answer_json_lines(const std::function<Result<json::Value>(const json::Value&)>& answer);

}  // namespace tessera

// JSON with a member a line and two spaces a level, as model folders have it.
#pragma once

#include <string>

#include "base/json.h"

namespace tessera {

std::string pretty_json(const json::Value& value);

}  // namespace tessera

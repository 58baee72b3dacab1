// What the folder's JSON files say, before they become a ModelConfig: private to this layer (loader.h is its
// border).
#pragma once

#include <string>
#include <string_view>

#include "base/json.h"
#include "types/model_config.h"
#include "weights/loader.h"

namespace tessera {

inline constexpr size_t kConfigBytesMax = size_t{16} << 20;  // of config.json and generation_config.json

// A JSON object from text; `file` names it in errors.
Result<json::Value> parse_json_object(std::string_view text, const std::string& file);
// REQUIRES: config is an object.
Result<ModelConfig> model_config_from_json(const json::Value& config, const std::string& file);
// generation_config.json's text; adds its EOS ids to config.
Result<GenerationDefaults> parse_generation_defaults(std::string_view text, const std::string& file,
                                                     ModelConfig& config);

}  // namespace tessera

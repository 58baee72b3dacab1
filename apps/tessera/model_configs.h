// Model configs without a checkpoint: those that the binary knows by name, and files.
#pragma once

#include <string>

#include "base/status.h"
#include "types/model_config.h"

namespace tessera {

// `name` is "hy3" (the published 295B model), or the path of a config.json or of a folder with one.
Result<ModelConfig> find_model_config(const std::string& name);

// The first `layers` layers of it, without the MTP layer. 0 = all.
Result<ModelConfig> with_layers(ModelConfig config, int64_t layers);

}  // namespace tessera

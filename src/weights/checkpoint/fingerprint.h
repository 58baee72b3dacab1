// The fingerprint of a checkpoint: two folders with different weights or configs have different ones.
#pragma once

#include <array>
#include <cstdint>
#include <string_view>

#include "weights/checkpoint/checkpoint.h"

namespace tessera {

// SHA-256 over config.json's text and, for every tensor in the order of canonical names: name, dtype, shape
// and bytes (all of a small tensor, evenly spread samples of a large one). How the tensors are cut into
// shards does not matter.
std::array<uint8_t, 32> checkpoint_fingerprint(const Checkpoint& checkpoint, std::string_view config_text);

}  // namespace tessera

// Which files of a model folder hold its tensors.
#pragma once

#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/status.h"

namespace tessera {

struct ShardList {
    std::vector<std::string> files;  // plain names inside the folder, sorted
    std::string index_file;          // path of the index, or empty
    // From the index: (tensor, file) for every tensor it names.
    std::vector<std::pair<std::string, std::string>> placement;
};

// Taken in this order: model.safetensors.index.json and the shards it names; model.safetensors; every
// *.safetensors. kv_cache_scales.safetensors comes in addition when it is there.
Result<ShardList> list_shards(const std::string& folder);

// The weight_map of an index file's text. Shard names must be plain file names.
Result<ShardList> parse_shard_index(std::string_view text, const std::string& file);

}  // namespace tessera

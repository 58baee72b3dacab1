#include "weights/checkpoint/shard_list.h"

#include <algorithm>
#include <filesystem>
#include <fmt/format.h>

#include "base/json.h"
#include "weights/checkpoint/files.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kIndexName = "model.safetensors.index.json";
constexpr std::string_view kSingleName = "model.safetensors";
constexpr std::string_view kKvScalesName = "kv_cache_scales.safetensors";
constexpr size_t kIndexBytesMax = size_t{64} << 20;
constexpr size_t kFilesMax = 10'000;

bool exists(const std::string& folder, std::string_view name) {
    std::error_code error;
    return fs::exists(fs::path(folder) / name, error);
}

// A shard name can reach no file outside the folder.
bool is_plain_file_name(std::string_view name) {
    return !name.empty() && name.size() <= 255 && name != "." && name != ".." &&
           name.find_first_of(std::string_view("/\\\0", 3)) == std::string_view::npos;
}

Result<ShardList> read_index(const std::string& folder) {
    const std::string path = join_path(folder, std::string(kIndexName));
    const Result<std::string> text = read_text_file(path, kIndexBytesMax);
    if (!text.ok()) {
        return text.status();
    }
    Result<ShardList> shards = parse_shard_index(*text, path);
    if (!shards.ok()) {
        return shards;
    }
    for (const std::string& file : shards->files) {
        if (!exists(folder, file)) {
            return not_found(fmt::format("{}: names the shard {}, which is not in the folder", path, file));
        }
    }
    return shards;
}

Result<ShardList> scan_folder(const std::string& folder) {
    ShardList shards;
    std::error_code error;
    for (fs::directory_iterator it(folder, error), end; !error && it != end; it.increment(error)) {
        if (it->path().extension() == ".safetensors" && shards.files.size() < kFilesMax) {
            shards.files.push_back(it->path().filename().string());
        }
    }
    if (error) {
        return not_found(fmt::format("{}: the folder cannot be read: {}", folder, error.message()));
    }
    if (shards.files.empty()) {
        return not_found(
            fmt::format("{}: no weights: neither {} nor any *.safetensors file", folder, kIndexName));
    }
    std::ranges::sort(shards.files);
    return shards;
}

}  // namespace

Result<ShardList> parse_shard_index(std::string_view text, const std::string& file) {
    const Result<json::Value> index = json::parse(text, {.depth_max = 8, .bytes_max = kIndexBytesMax});
    if (!index.ok()) {
        return invalid_argument(fmt::format("{}: {}", file, index.status().message()));
    }
    const json::Value* map = index->find("weight_map");
    if (map == nullptr || !map->is_object() || map->members().empty()) {
        return invalid_argument(
            fmt::format("{}: weight_map must be an object from tensor names to shard names", file));
    }
    ShardList shards;
    shards.index_file = file;
    for (const auto& [tensor, shard] : map->members()) {
        if (!shard.is_string() || !is_plain_file_name(shard.as_string())) {
            return invalid_argument(fmt::format(
                "{}: tensor {} is mapped to {}; a shard must be a plain file name inside the folder", file,
                tensor, json::dump(shard)));
        }
        shards.placement.emplace_back(tensor, shard.as_string());
        shards.files.push_back(shard.as_string());
    }
    std::ranges::sort(shards.files);
    const auto repeated = std::ranges::unique(shards.files);
    shards.files.erase(repeated.begin(), repeated.end());
    if (shards.files.size() > kFilesMax) {
        return invalid_argument(
            fmt::format("{}: names {} shards; at most {} are read", file, shards.files.size(), kFilesMax));
    }
    return shards;
}

Result<ShardList> list_shards(const std::string& folder) {
    if (!exists(folder, kIndexName) && !exists(folder, kSingleName)) {
        return scan_folder(folder);
    }
    ShardList shards;
    if (exists(folder, kIndexName)) {
        Result<ShardList> indexed = read_index(folder);
        if (!indexed.ok()) {
            return indexed;
        }
        shards = indexed.take();
    } else {
        shards.files.emplace_back(kSingleName);
    }
    if (exists(folder, kKvScalesName) && !std::ranges::binary_search(shards.files, kKvScalesName)) {
        shards.files.emplace_back(kKvScalesName);
    }
    return shards;
}

}  // namespace tessera

// A safetensors file, or the index of a sharded one, of any bytes: an error, or entries that lie inside the
// file.
#include <cstddef>
#include <cstdint>
#include <span>
#include <string_view>

#include "base/check.h"
#include "weights/checkpoint/name_map.h"
#include "weights/checkpoint/safetensors.h"
#include "weights/checkpoint/shard_list.h"

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    using namespace tessera;
    const auto entries = parse_safetensors(std::as_bytes(std::span(data, size)), "fuzz.safetensors");
    if (entries.ok()) {
        uint64_t end = 0;
        for (const TensorEntry& entry : *entries) {
            check(entry.offset <= size && entry.bytes <= size - entry.offset, "an entry leaves the file");
            check(entry.offset >= end, "entries overlap");
            end = entry.offset + entry.bytes;
            static_cast<void>(canonical_name(entry.name));
        }
    }
    const auto shards = parse_shard_index({reinterpret_cast<const char*>(data), size}, "index.json");
    if (shards.ok()) {
        for (const std::string& file : shards->files) {
            check(file.find('/') == std::string::npos && file != "..", "a shard name leaves the folder");
        }
    }
    return 0;
}

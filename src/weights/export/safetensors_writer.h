// Writes tensors as safetensors files of bounded size, with the index that names each tensor's file.
#pragma once

#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "base/status.h"
#include "weights/checkpoint/files.h"

namespace tessera {

// A tensor to write. Its bytes are there already (`data`), or made when they are needed (`make`).
struct OutputTensor {
    std::string name;
    std::string dtype;  // as the format spells it: "BF16"
    std::vector<int64_t> shape;
    int64_t bytes = 0;
    const void* data = nullptr;
    std::function<void(std::span<std::byte> out)> make;  // fills all `bytes`
};

// Called with the bytes written and in all, after each tensor; false stops the writing, whose status is then
// kCancelled. May be empty.
using WriteProgress = std::function<bool(int64_t done, int64_t total)>;

// One file with the tensors in this order; synced to the disk. `wrote` says after each whether to go on.
Status write_safetensors(const std::string& path, std::span<const OutputTensor> tensors,
                         const std::function<bool(int64_t bytes)>& wrote = {});

struct ShardOptions {
    int64_t bytes_max = int64_t{5} << 30;  // of a file's tensors; a larger tensor gets a file of its own
    WriteProgress progress;
};

// model-00001-of-0000N.safetensors and so on, in the tensors' order, and model.safetensors.index.json.
// `beside` names tensors of files that the caller writes: {tensor, file} entries for the index.
using IndexEntry = std::pair<std::string, std::string>;
Status write_shards(const std::string& folder, std::span<const OutputTensor> tensors,
                    std::span<const IndexEntry> beside, const ShardOptions& options);

// A small file, synced to the disk.
Status write_text_file(const std::string& path, std::string_view text);

}  // namespace tessera

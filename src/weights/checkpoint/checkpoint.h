// Checkpoint: the mapped files of a model folder and the tensors in them, by canonical name. It owns every
// byte that a WeightView points at.
#pragma once

#include <atomic>
#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "base/status.h"
#include "base/thread_pool.h"
#include "weights/checkpoint/files.h"
#include "weights/checkpoint/safetensors.h"

namespace tessera {

struct CheckpointTensor {
    TensorEntry entry;                // entry.name as the file spells it
    const std::byte* data = nullptr;  // aligned to the element size of a weight dtype
    size_t file = 0;
    bool used = false;  // bound to a weight, or knowingly left out
};

using LoadProgress = std::function<void(int64_t done, int64_t total)>;

class Checkpoint {
  public:
    // Maps the files and reads their headers in parallel; the tensors' bytes are not touched.
    static Result<std::shared_ptr<Checkpoint>> open(const std::string& folder, ThreadPool& pool);

    // The tensor of this canonical name, or null.
    CheckpointTensor* find(std::string_view canonical);
    // Sorted by canonical name.
    const std::vector<std::pair<std::string, CheckpointTensor*>>& sorted() const { return sorted_; }
    const std::string& path(const CheckpointTensor& tensor) const { return files_[tensor.file].path; }
    const std::string& folder() const { return folder_; }
    int64_t tensor_bytes() const { return tensor_bytes_; }

    // Memory beside the maps that lives as long as they do (widened or realigned copies).
    std::byte* allocate(size_t bytes);

    // Faults every page in, in parallel. `progress` may be empty.
    Status touch(ThreadPool& pool, const LoadProgress& progress) const;
    void drop_pages() const;

  private:
    struct File {
        std::string path;
        MappedFile map;
    };

    Status map_files(const std::string& folder, const std::vector<std::string>& names);
    Status add_tensors(size_t file, std::vector<TensorEntry> entries);
    const std::byte* aligned_data(const TensorEntry& entry, size_t file);

    std::string folder_;
    std::vector<File> files_;
    std::deque<CheckpointTensor> tensors_;
    std::unordered_map<std::string, CheckpointTensor*> by_name_;
    std::vector<std::pair<std::string, CheckpointTensor*>> sorted_;
    std::deque<std::vector<std::byte>> owned_;
    int64_t tensor_bytes_ = 0;
};

}  // namespace tessera

// Reading files of the model folder: whole small ones as text, large ones as read-only memory maps.
#pragma once

#include <cstddef>
#include <span>
#include <string>

#include "base/status.h"

namespace tessera {

std::string join_path(const std::string& folder, const std::string& name);
// kNotFound when it is no folder.
Status check_model_folder(const std::string& folder);
// kNotFound when there is no such file; an error when it is larger than bytes_max or no regular file.
Result<std::string> read_text_file(const std::string& path, size_t bytes_max);

// A read-only map of a regular file; unmapped when destroyed. Links are followed (model caches are made of
// them).
class MappedFile {
  public:
    static Result<MappedFile> open(const std::string& path);
    ~MappedFile();
    MappedFile(MappedFile&& other) noexcept;
    MappedFile& operator=(MappedFile&&) = delete;
    MappedFile(const MappedFile&) = delete;

    std::span<const std::byte> bytes() const { return {data_, size_}; }
    // Reads [offset, offset + count) into memory. False when the kernel could not (the file shrank meanwhile,
    // or the disk failed): touching those bytes would then kill the process.
    bool populate(size_t offset, size_t count) const;
    // Takes the pages out of the process; a later read faults them in again.
    void drop() const;

  private:
    MappedFile(const std::byte* data, size_t size) : data_(data), size_(size) {}

    const std::byte* data_ = nullptr;
    size_t size_ = 0;
};

}  // namespace tessera

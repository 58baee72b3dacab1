// DeviceBuffer and PinnedBuffer: owned device memory and page-locked host memory. Taken at start; a running
// step allocates nothing.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string_view>

#include "base/status.h"
#include "device/memory_budget.h"

namespace tessera {

class DeviceBuffer {
  public:
    DeviceBuffer() = default;

    // Entered in the budget first, which must outlive the buffer. At least 256-byte aligned; the contents are
    // whatever was there. Blocks (cudaMalloc).
    static Result<DeviceBuffer> allocate(MemoryBudget& budget, MemoryCategory category, std::string_view name,
                                         int64_t bytes);

    std::byte* data() const { return data_.get(); }
    int64_t bytes() const { return data_ ? data_.get_deleter().bytes : 0; }
    template <typename T>
    T* as() const {
        return reinterpret_cast<T*>(data_.get());
    }

  private:
    struct Release {
        MemoryBudget* budget;
        MemoryBudget::EntryId entry;
        int64_t bytes;
        void operator()(std::byte* data) const;
    };
    std::unique_ptr<std::byte, Release> data_;
};

class PinnedBuffer {
  public:
    PinnedBuffer() = default;

    // Zero-filled. Copies between it and the device run without the host's help.
    static Result<PinnedBuffer> allocate(std::string_view name, int64_t bytes);

    std::byte* data() const { return data_.get(); }
    int64_t bytes() const { return data_ ? data_.get_deleter().bytes : 0; }
    template <typename T>
    T* as() const {
        return reinterpret_cast<T*>(data_.get());
    }

  private:
    struct Release {
        int64_t bytes;
        void operator()(std::byte* data) const;
    };
    std::unique_ptr<std::byte, Release> data_;
};

}  // namespace tessera

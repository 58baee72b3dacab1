// HostBuffer: owned, 64-byte-aligned host memory. The only owner of raw memory on the CPU side.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string_view>

#include "base/status.h"

namespace tessera {

class HostBuffer {
  public:
    HostBuffer() = default;
    // Zero-filled; the pages are touched by whoever writes them first. For what is small: it is a defect when
    // there is no room.
    explicit HostBuffer(int64_t bytes);
    // The same for what a model or a flag makes large. Without room, an error with the bytes; `what` is its
    // subject, `advice` says what would need less.
    static Result<HostBuffer> allocate(int64_t bytes, std::string_view what, std::string_view advice);

    std::byte* data() const { return data_.get(); }
    int64_t bytes() const { return data_ ? data_.get_deleter().bytes : 0; }
    template <typename T>
    T* as() const {
        return reinterpret_cast<T*>(data_.get());
    }

  private:
    // False: the system has no room.
    bool map(int64_t bytes);

    struct Release {
        int64_t bytes;
        void operator()(std::byte* data) const;
    };
    std::unique_ptr<std::byte, Release> data_;
};

}  // namespace tessera

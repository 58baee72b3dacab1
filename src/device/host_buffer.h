// HostBuffer: owned, 64-byte-aligned host memory. The only owner of raw memory on the CPU side.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

namespace tessera {

class HostBuffer {
  public:
    HostBuffer() = default;
    // Zero-filled; the pages are touched by whoever writes them first.
    explicit HostBuffer(int64_t bytes);

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

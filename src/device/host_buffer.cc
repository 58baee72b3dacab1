#include "device/host_buffer.h"

#include <cerrno>
#include <cstring>
#include <fmt/format.h>
#include <sys/mman.h>

#include "base/check.h"
#include "device/memory_budget.h"

namespace tessera {

// Anonymous mappings are page-aligned and zero, and cost memory only where they are touched, so that a KV
// pool of the configured size does not make a start slow.
bool HostBuffer::map(int64_t bytes) {
    void* mapped = mmap(nullptr, static_cast<size_t>(bytes), PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (mapped == MAP_FAILED) {
        return false;
    }
    madvise(mapped, static_cast<size_t>(bytes), MADV_HUGEPAGE);
    data_ = std::unique_ptr<std::byte, Release>(static_cast<std::byte*>(mapped), Release{bytes});
    return true;
}

HostBuffer::HostBuffer(int64_t bytes) {
    check(bytes <= 0 || map(bytes), "out of memory: mmap of a host buffer failed");
}

Result<HostBuffer> HostBuffer::allocate(int64_t bytes, std::string_view what, std::string_view advice) {
    HostBuffer buffer;
    if (bytes > 0 && !buffer.map(bytes)) {
        return resource_exhausted(fmt::format("no memory for {}: {} were asked for ({}): {}", what,
                                              format_bytes(bytes), std::strerror(errno), advice));
    }
    return buffer;
}

void HostBuffer::Release::operator()(std::byte* data) const {
    munmap(data, static_cast<size_t>(bytes));
}

}  // namespace tessera

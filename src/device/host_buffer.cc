#include "device/host_buffer.h"

#include <sys/mman.h>

#include "base/check.h"

namespace tessera {

// Anonymous mappings are page-aligned and zero, and cost memory only where they are touched, so that a KV
// pool of the configured size does not make a start slow.
HostBuffer::HostBuffer(int64_t bytes) {
    if (bytes <= 0) {
        return;
    }
    void* mapped = mmap(nullptr, static_cast<size_t>(bytes), PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    check(mapped != MAP_FAILED, "out of memory: mmap of a host buffer failed");
    madvise(mapped, static_cast<size_t>(bytes), MADV_HUGEPAGE);
    data_ = std::unique_ptr<std::byte, Release>(static_cast<std::byte*>(mapped), Release{bytes});
}

void HostBuffer::Release::operator()(std::byte* data) const {
    munmap(data, static_cast<size_t>(bytes));
}

}  // namespace tessera

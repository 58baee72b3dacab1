#include "device/cuda/buffer.h"

#include <algorithm>
#include <cstring>
#include <fmt/format.h>

#include "device/cuda/cuda_check.h"

namespace tessera {

Result<DeviceBuffer> DeviceBuffer::allocate(MemoryBudget& budget, MemoryCategory category,
                                            std::string_view name, int64_t bytes) {
    Result<MemoryBudget::EntryId> entry = budget.reserve(category, name, bytes);
    if (!entry.ok()) {
        return entry.status();
    }
    void* data = nullptr;
    // An empty buffer still has an address.
    const cudaError_t error = cudaMalloc(&data, static_cast<size_t>(std::max<int64_t>(bytes, 1)));
    if (error != cudaSuccess) {
        cudaGetLastError();  // the failure is reported here and must not be found again after a launch
        budget.release(*entry);
        return cuda_status(error, fmt::format("device memory for {} ({})", name, format_bytes(bytes)));
    }
    DeviceBuffer buffer;
    buffer.data_ = {static_cast<std::byte*>(data), Release{&budget, *entry, bytes}};
    return buffer;
}

void DeviceBuffer::Release::operator()(std::byte* data) const {
    cuda_check(cudaFree(data));
    budget->release(entry);
}

Result<PinnedBuffer> PinnedBuffer::allocate(std::string_view name, int64_t bytes) {
    void* data = nullptr;
    const size_t size = static_cast<size_t>(std::max<int64_t>(bytes, 1));
    const cudaError_t error = cudaHostAlloc(&data, size, cudaHostAllocDefault);
    if (error != cudaSuccess) {
        cudaGetLastError();
        return cuda_status(error,
                           fmt::format("page-locked host memory for {} ({})", name, format_bytes(bytes)));
    }
    std::memset(data, 0, size);
    PinnedBuffer buffer;
    buffer.data_ = {static_cast<std::byte*>(data), Release{bytes}};
    return buffer;
}

void PinnedBuffer::Release::operator()(std::byte* data) const {
    cuda_check(cudaFreeHost(data));
}

}  // namespace tessera

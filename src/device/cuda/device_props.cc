#include "device/cuda/device_props.h"

#include <algorithm>
#include <fmt/format.h>

#include <cuda_runtime_api.h>

#include "device/cuda/cuda_check.h"

namespace tessera {

Result<DeviceProps> open_device(int index) {
    int count = 0;
    if (const cudaError_t error = cudaGetDeviceCount(&count); error != cudaSuccess) {
        return cuda_status(error, "no CUDA device");
    }
    if (index < 0 || index >= count) {
        return invalid_argument(fmt::format("CUDA device {} asked for, but there are {}", index, count));
    }
    cudaDeviceProp prop{};
    if (const cudaError_t error = cudaGetDeviceProperties(&prop, index); error != cudaSuccess) {
        return cuda_status(error, fmt::format("CUDA device {}", index));
    }
    if (prop.major != 9 || prop.minor != 0) {
        return invalid_argument(
            fmt::format("CUDA device {} ({}) has compute capability {}.{}; the kernels need 9.0", index,
                        prop.name, prop.major, prop.minor));
    }
    size_t free_bytes = 0;
    size_t total_bytes = 0;
    cudaError_t error = cudaSetDevice(index);
    if (error == cudaSuccess) {
        error = cudaMemGetInfo(&free_bytes, &total_bytes);
    }
    if (error != cudaSuccess) {
        return cuda_status(error, fmt::format("CUDA device {}", index));
    }
    return DeviceProps{.index = index,
                       .name = prop.name,
                       .compute_major = prop.major,
                       .compute_minor = prop.minor,
                       .sm_count = prop.multiProcessorCount,
                       .l2_bytes = prop.l2CacheSize,
                       .shared_bytes_max = static_cast<int64_t>(prop.sharedMemPerBlockOptin),
                       .memory_bytes = static_cast<int64_t>(total_bytes),
                       .free_bytes = static_cast<int64_t>(free_bytes)};
}

int64_t usable_bytes(const DeviceProps& device, double utilization) {
    const auto share = static_cast<int64_t>(static_cast<double>(device.memory_bytes) * utilization);
    return std::min(share, device.free_bytes);
}

void use_device(const DeviceProps& device) {
    cuda_check(cudaSetDevice(device.index));
}

}  // namespace tessera

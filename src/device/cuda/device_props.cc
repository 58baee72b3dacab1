#include "device/cuda/device_props.h"

#include <algorithm>
#include <fmt/format.h>
#include <string_view>

#include <cuda_runtime_api.h>

#include "device/cuda/cuda_check.h"

namespace tessera {

namespace {

std::string version_text(int version) {
    return fmt::format("{}.{}", version / 1000, version % 1000 / 10);
}

// CUDA has one error for a driver that is missing and one that is too old, and its text speaks of the latter.
Status no_device(cudaError_t error) {
    int driver = 0;  // the CUDA version that it knows; 0 = there is none
    if (cudaDriverGetVersion(&driver) != cudaSuccess) {
        driver = 0;
    }
    const std::string needed = version_text(CUDART_VERSION / 1000 * 1000);
    constexpr std::string_view kInstead = "--device cpu works without one";
    if (driver == 0) {
        return unavailable(fmt::format(
            "no CUDA device: no NVIDIA driver was found on this machine; it takes one for CUDA {} or "
            "later. {}",
            needed, kInstead));
    }
    if (error == cudaErrorInsufficientDriver) {
        return unavailable(fmt::format(
            "no CUDA device: the NVIDIA driver knows CUDA {}, and this build needs one for {} or later. {}",
            version_text(driver), needed, kInstead));
    }
    return unavailable(fmt::format("{}. {}", cuda_status(error, "no CUDA device").message(), kInstead));
}

}  // namespace

Result<DeviceProps> open_device(int index) {
    int count = 0;
    if (const cudaError_t error = cudaGetDeviceCount(&count); error != cudaSuccess) {
        return no_device(error);
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

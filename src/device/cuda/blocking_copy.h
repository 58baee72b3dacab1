// Copies and fills for start-up and tests: the device has ended all earlier work before they begin, and they
// have ended when they return. The bare calls promise neither: cudaMemset() and cudaMemcpy() from pageable
// memory may return while the device still writes, and a Stream does not wait for the default stream that
// they run on.
#pragma once

#include <cstddef>
#include <cstdint>

#include <cuda_runtime_api.h>

#include "device/cuda/cuda_check.h"

namespace tessera {

// Between the host and the device, either way, or within the device.
inline void copy_blocking(void* to, const void* from, int64_t bytes) {
    cuda_check(cudaDeviceSynchronize());
    cuda_check(cudaMemcpy(to, from, static_cast<size_t>(bytes), cudaMemcpyDefault));
    cuda_check(cudaDeviceSynchronize());
}

// `bytes` bytes of device memory, each `value`: 0xFF is a NaN in every float format and -1 as an integer.
inline void fill_blocking(void* to, int value, int64_t bytes) {
    cuda_check(cudaDeviceSynchronize());
    cuda_check(cudaMemset(to, value, static_cast<size_t>(bytes)));
    cuda_check(cudaDeviceSynchronize());
}

}  // namespace tessera

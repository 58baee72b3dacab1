// What happens when a CUDA call fails. While the engine starts, the world can be the cause (no device, no
// memory): a Status. Afterwards a failed call means that a kernel or its arguments are wrong, and nothing on
// the device can be trusted any more: fatal, with the place of the call.
#pragma once

#include <source_location>
#include <string_view>

#include <cuda_runtime_api.h>

#include "base/status.h"

namespace tessera {

[[noreturn]] void cuda_failed(cudaError_t error, std::source_location where);

inline void cuda_check(cudaError_t error, std::source_location where = std::source_location::current()) {
    if (error != cudaSuccess) [[unlikely]] {
        cuda_failed(error, where);
    }
}

// After a kernel launch: the launch's own error. Does not wait for the kernel.
inline void cuda_check_launch(std::source_location where = std::source_location::current()) {
    cuda_check(cudaGetLastError(), where);
}

// "WHAT: out of memory (cudaErrorMemoryAllocation)".
Status cuda_status(cudaError_t error, std::string_view what);

}  // namespace tessera

// Programmatic dependent launch: a kernel may start while the one before it in the stream still runs, bring
// what that one does not write (weights), and wait for its end only where it needs its results. In a graph of
// small kernels this hides the start of each behind the end of the one before.
//
// A kernel entered so calls wait_for_previous_kernel() before it reads or writes anything that an earlier
// kernel writes or reads; every thread that does so waits, and at least one of each block, so that the chain
// of ends is not broken.
#pragma once

#include <cuda_runtime_api.h>

namespace tessera::cuda {

// Until the kernel before in the stream has ended and its writes are visible.
__device__ __forceinline__ void wait_for_previous_kernel() {
    asm volatile("griddepcontrol.wait;" ::: "memory");
}
// The next kernel may start now; it waits for this one's end where it needs its results.
__device__ __forceinline__ void let_next_kernel_start() {
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

struct DependentLaunch {
    dim3 grid;
    int threads = 0;
    int shared_bytes = 0;
    cudaStream_t stream = nullptr;
    int cluster = 1;  // blocks of a cluster, along x
};
// Enters a kernel that may start before the one before it has ended.
template <typename... Args>
cudaError_t launch_dependent(const DependentLaunch& launch, void (*kernel)(Args...), const Args&... args) {
    cudaLaunchAttribute attributes[2]{};
    attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[0].val.programmaticStreamSerializationAllowed = 1;
    attributes[1].id = cudaLaunchAttributeClusterDimension;
    attributes[1].val.clusterDim.x = static_cast<unsigned>(launch.cluster);
    attributes[1].val.clusterDim.y = 1;
    attributes[1].val.clusterDim.z = 1;
    cudaLaunchConfig_t config{};
    config.gridDim = launch.grid;
    config.blockDim = dim3(static_cast<unsigned>(launch.threads));
    config.dynamicSmemBytes = static_cast<size_t>(launch.shared_bytes);
    config.stream = launch.stream;
    config.attrs = attributes;
    config.numAttrs = launch.cluster > 1 ? 2 : 1;
    return cudaLaunchKernelEx(&config, kernel, args...);
}

}  // namespace tessera::cuda

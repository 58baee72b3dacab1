// Blocks that run together as a cluster and see each other's shared memory.
#pragma once

#include <cstdint>

namespace tessera::cuda {

// The blocks of a cluster (one block, where the launch names none).
__device__ __forceinline__ uint32_t cluster_rank() {
    uint32_t rank;
    asm volatile("mov.u32 %0, %cluster_ctarank;" : "=r"(rank));
    return rank;
}
__device__ __forceinline__ uint32_t cluster_size() {
    uint32_t size;
    asm volatile("mov.u32 %0, %cluster_nctarank;" : "=r"(size));
    return size;
}
// Every thread of every block.
__device__ __forceinline__ void cluster_sync() {
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::
                     : "memory");
}
// What lies at `address` in the shared memory of another block.
__device__ __forceinline__ int32_t load_cluster(uint32_t address, uint32_t rank) {
    int32_t value;
    asm volatile(
        "{\n"
        ".reg .b32 remote;\n"
        "mapa.shared::cluster.u32 remote, %1, %2;\n"
        "ld.shared::cluster.s32 %0, [remote];\n"
        "}\n"
        : "=r"(value)
        : "r"(address), "r"(rank)
        : "memory");
    return value;
}

}  // namespace tessera::cuda

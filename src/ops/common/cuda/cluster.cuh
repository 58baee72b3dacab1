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
// That all have come here, without what they wrote.
__device__ __forceinline__ void cluster_meet() {
    asm volatile("barrier.cluster.arrive.relaxed.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
}
// Its first half; cluster_wait() is the second.
__device__ __forceinline__ void cluster_arrive_relaxed() {
    asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory");
}
// The halves of cluster_sync(): every thread of every block arrives; those wait that need it. No thread ends
// between them.
__device__ __forceinline__ void cluster_arrive() {
    asm volatile("barrier.cluster.arrive.release.aligned;" ::: "memory");
}
__device__ __forceinline__ void cluster_wait() {
    asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory");
}
// Of what lies at `address` in this block's shared memory: its twin's address in another block's.
__device__ __forceinline__ uint32_t address_in_block(uint32_t address, uint32_t rank) {
    uint32_t out;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(out) : "r"(address), "r"(rank));
    return out;
}
// Arrives at the twin of `barrier` in another block.
__device__ __forceinline__ void barrier_arrive_in(uint32_t barrier, uint32_t rank) {
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(address_in_block(barrier, rank))
                 : "memory");
}
// Four values to an address from address_in_block(), 16-byte aligned; `barrier`, of the same block, gets
// their bytes.
__device__ __forceinline__ void store_to_block(uint32_t address, const float (&v)[4], uint32_t barrier) {
    asm volatile(
        "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];" ::
            "r"(address),
        "f"(v[0]), "f"(v[1]), "f"(v[2]), "f"(v[3]), "r"(barrier)
        : "memory");
}
// 4 or 16 bytes to their place in both blocks of a cluster of two; the twins of `barrier` get the bytes.
template <typename Value>
__device__ __forceinline__ void store_to_both(uint32_t address, uint32_t barrier, const Value& v) {
#pragma unroll
    for (uint32_t rank = 0; rank < 2; ++rank) {
        const uint32_t to = address_in_block(address, rank);
        const uint32_t told = address_in_block(barrier, rank);
        if constexpr (sizeof(Value) == 4) {
            asm volatile(
                "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.u32 [%0], %1, [%2];" ::"r"(to),
                "r"(v), "r"(told)
                : "memory");
        } else {
            asm volatile(
                "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.u32 [%0], {%1, %2, %3, %4}, "
                "[%5];" ::"r"(to),
                "r"(v.x), "r"(v.y), "r"(v.z), "r"(v.w), "r"(told)
                : "memory");
        }
    }
}
__device__ __forceinline__ int32_t load_from_block(uint32_t address, uint32_t rank) {
    int32_t value;
    asm volatile("ld.shared::cluster.s32 %0, [%1];"
                 : "=r"(value)
                 : "r"(address_in_block(address, rank))
                 : "memory");
    return value;
}
__device__ __forceinline__ float4 load_float4_from_block(uint32_t address, uint32_t rank) {
    float4 v;
    asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
                 : "r"(address_in_block(address, rank))
                 : "memory");
    return v;
}

}  // namespace tessera::cuda

// Asynchronous copies into shared memory and the barriers that tell of their arrival: cp.async (16 bytes a
// thread, any address), the bulk tensor copy engine (boxes of a tensor map), and mbarriers.
#pragma once

#include <cstdint>

#include <cuda.h>

#include "ops/common/cuda/cache_policy.cuh"

namespace tessera::cuda {

__device__ __forceinline__ uint32_t shared_address(const void* pointer) {
    return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// 16 bytes; both addresses 16-byte aligned. With `bytes` 0 nothing is read and zeros are written.
__device__ __forceinline__ void copy_async_16(uint32_t to, const void* from, int bytes = 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(bytes) : "memory");
}
// 4 bytes; both addresses 4-byte aligned.
__device__ __forceinline__ void copy_async_4(uint32_t to, const void* from) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(from) : "memory");
}
__device__ __forceinline__ void copy_async_commit() {
    asm volatile("cp.async.commit_group;" ::: "memory");
}
// Until at most Pending groups of this thread are under way.
template <int Pending>
__device__ __forceinline__ void copy_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(Pending) : "memory");
}

__device__ __forceinline__ void barrier_init(uint32_t barrier, uint32_t arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}
// Makes initialised barriers visible to the copy engine. A __syncthreads() follows.
__device__ __forceinline__ void barrier_init_fence() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}
__device__ __forceinline__ void barrier_arrive(uint32_t barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}
// For a warp or a warpgroup whose threads are all through, one of them arrives. compute-sanitizer's racecheck
// counts only what the arriving thread itself has done, so in a build with TESSERA_RACECHECK all of them
// arrive. kWarpArrivals and kGroupArrivals: what the barrier then counts for one of either.
#ifdef TESSERA_RACECHECK
inline constexpr bool kAllArrive = true;
#else
inline constexpr bool kAllArrive = false;
#endif
inline constexpr uint32_t kWarpArrivals = kAllArrive ? 32 : 1;
inline constexpr uint32_t kGroupArrivals = kAllArrive ? 128 : 1;
__device__ __forceinline__ void barrier_arrive_for_all(uint32_t barrier, bool chosen) {
    if (kAllArrive || chosen) {
        barrier_arrive(barrier);
    }
}
// Arrives, and tells the barrier to wait for `bytes` of bulk copies as well.
__device__ __forceinline__ void barrier_arrive_expect(uint32_t barrier, uint32_t bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
                 : "memory");
}
// Arrives when the cp.asyncs that this thread has issued so far are done.
__device__ __forceinline__ void barrier_arrive_copies(uint32_t barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}
// Waits for the phase with this parity to complete.
__device__ __forceinline__ void barrier_wait(uint32_t barrier, uint32_t parity) {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "again:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@done bra finished;\n"
        "bra again;\n"
        "finished:\n"
        "}\n" ::"r"(barrier),
        "r"(parity)
        : "memory");
}

// Orders ordinary accesses to shared memory before those of the tensor cores and the copy engine.
__device__ __forceinline__ void fence_proxy_async() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// The same for global memory too: data that other threads wrote and the copy engine shall read.
__device__ __forceinline__ void fence_proxy_async_all() {
    asm volatile("fence.proxy.async;" ::: "memory");
}

// A box of a two-dimensional tensor: `column`, `row` = its first element. Out-of-range elements are zeros;
// the barrier gets the whole box's bytes in any case.
__device__ __forceinline__ void copy_box(uint32_t to, const CUtensorMap* map, int column, int row,
                                         uint32_t barrier) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
        " [%0], [%1, {%2, %3}], [%4];" ::"r"(to),
        "l"(map), "r"(column), "r"(row), "r"(barrier)
        : "memory");
}
// The same for data that is read once: the level-2 cache gives it up first.
__device__ __forceinline__ void copy_box_once(uint32_t to, const CUtensorMap* map, int column, int row,
                                              uint32_t barrier) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint"
        " [%0], [%1, {%2, %3}], [%4], %5;" ::"r"(to),
        "l"(map), "r"(column), "r"(row), "r"(barrier), "l"(policy_to_leave())
        : "memory");
}
// The same of a tensor of three to five dimensions; place: of the first element, the innermost dimension
// first.
template <int Rank>
__device__ __forceinline__ void copy_box(uint32_t to, const CUtensorMap* map, const int (&place)[Rank],
                                         uint32_t barrier) {
    static_assert(Rank >= 3 && Rank <= 5);
    if constexpr (Rank == 5) {
        asm volatile(
            "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
            " [%0], [%1, {%2, %3, %4, %5, %6}], [%7];" ::"r"(to),
            "l"(map), "r"(place[0]), "r"(place[1]), "r"(place[2]), "r"(place[3]), "r"(place[4]), "r"(barrier)
            : "memory");
    } else if constexpr (Rank == 3) {
        asm volatile(
            "cp.async.bulk.tensor.3d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
            " [%0], [%1, {%2, %3, %4}], [%5];" ::"r"(to),
            "l"(map), "r"(place[0]), "r"(place[1]), "r"(place[2]), "r"(barrier)
            : "memory");
    } else {
        asm volatile(
            "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes"
            " [%0], [%1, {%2, %3, %4, %5}], [%6];" ::"r"(to),
            "l"(map), "r"(place[0]), "r"(place[1]), "r"(place[2]), "r"(place[3]), "r"(barrier)
            : "memory");
    }
}

// The same of five dimensions for data that is read once.
__device__ __forceinline__ void copy_box_once(uint32_t to, const CUtensorMap* map, const int (&place)[5],
                                              uint32_t barrier) {
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.L2::cache_hint"
        " [%0], [%1, {%2, %3, %4, %5, %6}], [%7], %8;" ::"r"(to),
        "l"(map), "r"(place[0]), "r"(place[1]), "r"(place[2]), "r"(place[3]), "r"(place[4]), "r"(barrier),
        "l"(policy_to_leave())
        : "memory");
}

// The same to the twins of `to` in both blocks of a cluster of two; the twins of `barrier` get the bytes.
__device__ __forceinline__ void copy_box_to_both(uint32_t to, const CUtensorMap* map, const int (&place)[4],
                                                 uint32_t barrier) {
    constexpr uint16_t kBoth = 3;
    asm volatile(
        "cp.async.bulk.tensor.4d.shared::cluster.global.tile.mbarrier::complete_tx::bytes.multicast::cluster"
        " [%0], [%1, {%2, %3, %4, %5}], [%6], %7;" ::"r"(to),
        "l"(map), "r"(place[0]), "r"(place[1]), "r"(place[2]), "r"(place[3]), "r"(barrier), "h"(kBoth)
        : "memory");
}

// `bytes` from global memory, a multiple of 16, both addresses 16-byte aligned.
__device__ __forceinline__ void copy_bulk(uint32_t to, const void* from, uint32_t bytes, uint32_t barrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(to),
        "l"(from), "r"(bytes), "r"(barrier)
        : "memory");
}

// The same for what is read once: it leaves the level-2 cache before all else.
__device__ __forceinline__ void copy_bulk_once(uint32_t to, const void* from, uint32_t bytes,
                                               uint32_t barrier) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, "
        "[%3], %4;" ::"r"(to),
        "l"(from), "r"(bytes), "r"(barrier), "l"(policy_to_leave())
        : "memory");
}

__device__ __forceinline__ void prefetch_map(const CUtensorMap* map) {
    asm volatile("prefetch.tensormap [%0];" ::"l"(map) : "memory");
}

// A barrier among `threads` threads of the block; ids 1 to 15 (0 is __syncthreads').
__device__ __forceinline__ void group_barrier(int id, int threads) {
    asm volatile("bar.sync %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Arrives without waiting: the others' group_barrier() counts these threads.
__device__ __forceinline__ void group_barrier_arrive(int id, int threads) {
    asm volatile("bar.arrive %0, %1;" ::"r"(id), "r"(threads) : "memory");
}

// Moves registers between warpgroups. Every warp of the warpgroup executes it.
template <int Registers>
__device__ __forceinline__ void registers_take() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Registers));
}
template <int Registers>
__device__ __forceinline__ void registers_give() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Registers));
}

}  // namespace tessera::cuda

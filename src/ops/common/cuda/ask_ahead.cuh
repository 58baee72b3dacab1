// Asking the level-2 cache for data before their use.
#pragma once

#include <cstdint>

namespace tessera::cuda {

// Asks the level-2 cache for the 128 bytes around `address`, which lies in an allocation, and waits for
// nothing. It tells nothing of what lies there, and all that reads and writes the device's memory does so in
// that cache: a kernel may ask before wait_for_previous_kernel() for what kernels before it have yet to write
// or have written. So the first data come from memory while the kernel before ends.
__device__ __forceinline__ void ask_ahead(const void* address) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(address));
}
// The same for `bytes`, a multiple of 16, from a 16-byte aligned address on; by one thread.
__device__ __forceinline__ void ask_ahead(const void* address, uint32_t bytes) {
    asm volatile("cp.async.bulk.prefetch.L2.global [%0], %1;" ::"l"(address), "r"(bytes));
}

}  // namespace tessera::cuda

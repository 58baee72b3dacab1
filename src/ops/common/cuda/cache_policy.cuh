// Policies of the level-2 cache, for copies, loads and stores.
#pragma once

#include <cstdint>

namespace tessera::cuda {

// It leaves the cache before all else: what is read once.
__device__ __forceinline__ uint64_t policy_to_leave() {
    uint64_t policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}
// It stays longer than all else.
__device__ __forceinline__ uint64_t policy_to_keep() {
    uint64_t policy;
    asm("createpolicy.fractional.L2::evict_last.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}
__device__ __forceinline__ uint64_t policy_as_usual() {
    uint64_t policy;
    asm("createpolicy.fractional.L2::evict_normal.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}

__device__ __forceinline__ void store_with_policy(uint8_t* to, uint4 v, uint64_t policy) {
    asm volatile("st.global.L2::cache_hint.v4.b32 [%0], {%1, %2, %3, %4}, %5;" ::"l"(to), "r"(v.x), "r"(v.y),
                 "r"(v.z), "r"(v.w), "l"(policy)
                 : "memory");
}

}  // namespace tessera::cuda

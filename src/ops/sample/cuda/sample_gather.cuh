// A row that one block reads, or a cluster of two: what the tiles' best tokens tell is gathered in
// the shared memory of the cluster's first block, which finishes the row.
#pragma once

#include "ops/common/cuda/async_copy.cuh"
#include "ops/common/cuda/cluster.cuh"
#include "ops/sample/cuda/sample_block.cuh"

namespace tessera::cuda {

inline constexpr int kGatherTiles = 160;  // of a row at most

struct SampleGathered {
    uint4 told[kGatherTiles];  // as SampleTileWords::best
    uint64_t all_told;         // a barrier
};

// A thread's part in the gathering.
class SampleGather {
  public:
    __device__ explicit SampleGather(SampleGathered& own) : own_(own) {}
    // A cluster_arrive() and a cluster_wait() follow.
    __device__ void begin() const {
        if (threadIdx.x == 0) {
            barrier_init(shared_address(&own_.all_told), cluster_size() * kSampleWarps);
        }
    }
    __device__ const uint4* told() const { return own_.told; }
    __device__ void tell(int tile, uint4 value) const {
        asm volatile("st.shared::cluster.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(in_first(own_.told + tile)),
                     "r"(value.x), "r"(value.y), "r"(value.z), "r"(value.w)
                     : "memory");
    }
    // This warp has told of all of its tiles.
    __device__ void end() const {
        __syncwarp();
        if (threadIdx.x % kWarp == 0) {
            asm volatile(
                "mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(in_first(&own_.all_told))
                : "memory");
        }
    }
    // Until all warps have. In the cluster's first block.
    __device__ void wait() const {
        asm volatile(
            "{\n"
            ".reg .pred done;\n"
            "again:\n"
            "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], 0;\n"
            "@done bra finished;\n"
            "bra again;\n"
            "finished:\n"
            "}\n" ::"r"(shared_address(&own_.all_told))
            : "memory");
    }

  private:
    __device__ static uint32_t in_first(const void* own) { return address_in_block(shared_address(own), 0); }

    SampleGathered& own_;
};

}  // namespace tessera::cuda

#include "base/check.h"
#include "device/cuda/cuda_check.h"
#include "ops/common/cuda/cluster.cuh"
#include "ops/common/cuda/mma.cuh"
#include "ops/common/cuda/shared_access.cuh"
#include "ops/router_topk/cuda/router_kernels.cuh"
#include "ops/router_topk/cuda/router_meet.cuh"
#include "ops/router_topk/cuda/router_ring.cuh"

namespace tessera::cuda {
namespace {

constexpr int kSplits = 2;  // of the width: the blocks of a pair
constexpr int kPitch = 8;   // floats beyond a row of logits: stores hit all banks
constexpr int kMinMultiprocessors = 128;

// The two blocks of a cluster multiply 64 TokenGroups tokens with BlockExperts experts over half of the width
// each, and end half of the tokens each. Helpers: warpgroups beside the one that multiplies, which store or
// choose; with none, two more warps fill the ring. The blocks send each other their sums in `Meetings` parts,
// so that one is stored while the next is under way.
template <int TokenGroups, int BlockExperts, int Helpers, int Meetings, bool Low, int XPace>
struct Tile
    : RingTile<TokenGroups, 1, BlockExperts, kSplits, Low, 32 * TokenGroups * BlockExperts * 4, XPace> {
    static constexpr int kRows = 32 * TokenGroups;  // tokens that a block ends
    static constexpr int kRowFloats = BlockExperts + kPitch;
    static constexpr int kMultipliers = 128 * TokenGroups;
    static constexpr int kHelpers = 128 * Helpers;
    static constexpr int kThreads = kMultipliers + (Helpers > 0 ? kHelpers : 2 * kWarp);
    static constexpr bool kChooses = Helpers > 0;
    static constexpr int kMeetings = Meetings;
    static constexpr int kPartExperts = BlockExperts / Meetings;
    static constexpr int kPieces = kPartExperts / 16;  // of 16 bytes, that a thread sends at a meeting
    static constexpr int kRowsAWarp = kRows / ((kMultipliers + kHelpers) / kWarp);
    static_assert(!kChooses || BlockExperts == kMeetExperts);
};

// A block ends eight of each 16 rows of the products. Row r of those is token r / 8 * 16 + r % 8 of the tile,
// in the second block 8 further.
template <typename T>
__device__ __forceinline__ int token_of(const RingPlace<T>& place, int row) {
    return place.tile_token + static_cast<int>(cluster_rank()) * 8 + row / 8 * 16 + row % 8;
}

// The barriers of a meeting: the other block's sums are there, the logits are there.
template <typename T>
__device__ __forceinline__ uint32_t met(const RingPlace<T>& place, int part) {
    return place.spare_barriers() + 8 * part;
}
template <typename T>
__device__ __forceinline__ uint32_t laid(const RingPlace<T>& place, int part) {
    return met(place, T::kMeetings + part);
}

// Sends the other block what it ends of the thread's sums.
template <typename T>
__device__ __forceinline__ void send(const RingPlace<T>& place, uint32_t room,
                                     const float (&sums)[T::kGroupExperts / 2]) {
    const bool first = cluster_rank() == 0;
    const uint32_t to = address_in_block(room, cluster_rank() ^ 1) + threadIdx.x * 16;
    const uint32_t barrier = address_in_block(met(place, 0), cluster_rank() ^ 1);
#pragma unroll
    for (int p = 0; p < T::kMeetings * T::kPieces; ++p) {
        float v[4];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int at = 8 * p + i / 2 * 4 + i % 2;
            v[i] = first ? sums[at + 2] : sums[at];
        }
        store_to_block(to + p * T::kMultipliers * 16, v, barrier + 8 * (p / T::kPieces));
    }
}

// Adds what the other block has sent for a meeting and lays down the logits, [rows][kRowFloats].
template <typename T>
__device__ __forceinline__ void receive(const RingPlace<T>& place, uint32_t room, int part,
                                        const float (&sums)[T::kGroupExperts / 2], float* logits) {
    const bool first = cluster_rank() == 0;
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
    float* row = logits + (static_cast<int>(threadIdx.x) / kWarp * 8 + lane / 4) * T::kRowFloats;
    barrier_wait(met(place, part), 0);
#pragma unroll
    for (int i = 0; i < T::kPieces; ++i) {
        const int p = part * T::kPieces + i;
        const float4 v = as_floats(load_shared_16(room + (p * T::kMultipliers + threadIdx.x) * 16));
        float2* to = reinterpret_cast<float2*>(row + 16 * p + lane % 4 * 2);
        const int at = 8 * p;
        to[0] = {(first ? sums[at] : sums[at + 2]) + v.x, (first ? sums[at + 1] : sums[at + 3]) + v.y};
        to[4] = {(first ? sums[at + 4] : sums[at + 6]) + v.z, (first ? sums[at + 5] : sums[at + 7]) + v.w};
    }
    __syncwarp();
    barrier_arrive_for_all(laid(place, part), lane == 0);
}

// Stores the logits of a meeting; by `Threads` threads, of which this is number `thread`.
template <int Threads, typename T>
__device__ __forceinline__ void store_part(const RingArgs& args, const RingPlace<T>& place, int part,
                                           int thread, const float* logits) {
    constexpr int kQuads = T::kPartExperts / 4;
    static_assert(T::kRows * kQuads % Threads == 0);
    barrier_wait(laid(place, part), 0);
#pragma unroll
    for (int i = 0; i < T::kRows * kQuads / Threads; ++i) {
        const int row = (thread + i * Threads) / kQuads;
        const int column = part * T::kPartExperts + (thread + i * Threads) % kQuads * 4;
        const int token = token_of(place, row);
        if (token < args.tokens) {
            store_logits(args.logits + token * args.logits_stride, place.first_expert + column, args.experts,
                         args.logits_stride % 4 == 0,
                         *reinterpret_cast<const float4*>(logits + row * T::kRowFloats + column));
        }
    }
}

// A multiplying thread.
template <typename T>
__device__ __forceinline__ void multiply(const RingArgs& args, const RingPlace<T>& place, uint32_t room,
                                         float* logits) {
    float sums[T::kGroupExperts / 2];
    multiply_chunks<T>(args, place, sums);
    cluster_wait();  // the other block's barriers are there
    send(place, room, sums);
    group_barrier(1, T::kMultipliers);  // the ring is free for the logits
#pragma unroll
    for (int part = 0; part < T::kMeetings; ++part) {
        receive(place, room, part, sums, logits);
        if (!T::kChooses) {
            store_part<T::kMultipliers>(args, place, part, static_cast<int>(threadIdx.x), logits);
        }
    }
}

// A thread that stores or chooses, and may multiply before.
template <bool Multiplies, typename T>
__device__ __forceinline__ void end_tokens(const RingArgs& args, const RingPlace<T>& place, uint32_t room,
                                           float* logits, SelectRoom* rooms) {
    constexpr int kWarps = (T::kMultipliers + T::kHelpers) / kWarp;
    const bool chooses = T::kChooses && args.choice.chosen != nullptr;
    const Beside<T::kRowsAWarp, kWarps> beside(args.choice, [&](int row) { return token_of(place, row); });
    if constexpr (Multiplies) {
        multiply(args, place, room, logits);
    } else {
        cluster_wait();
#pragma unroll
        for (int part = 0; part < T::kMeetings && !chooses; ++part) {
            store_part<T::kHelpers>(args, place, part, static_cast<int>(threadIdx.x) - T::kMultipliers,
                                    logits);
        }
    }
    if constexpr (T::kChooses) {
        if (!chooses) {
            return;
        }
        for (int part = 0; part < T::kMeetings; ++part) {
            barrier_wait(laid(place, part), 0);
        }
        const int warp = static_cast<int>(threadIdx.x) / kWarp;
#pragma unroll
        for (int r = 0; r < T::kRowsAWarp; ++r) {
            const int row = warp + r * kWarps;
            const int token = token_of(place, row);
            if (token < args.tokens) {
                beside.choose(args.choice, token, r, logits + row * T::kRowFloats, rooms[warp]);
            }
        }
    }
}

// Roofline as router_many's. From some 2,000 tokens on a block gets a megabyte from the second-level cache,
// at 64 bytes a clock, so that the tile counts: 64 tokens x 192 experts read shared memory least, by one
// instruction for all experts, and 128 x 96 where two products read a tile of x. Only two blocks share a sum:
// each pushes the other's half into its shared memory, where a barrier counts the bytes.
template <typename T>
__global__ void __launch_bounds__(T::kThreads, 1) router_pairs_kernel(const __grid_constant__ RingArgs args) {
    extern __shared__ std::byte memory[];
    __shared__ SelectRoom rooms[(T::kMultipliers + T::kHelpers) / kWarp];
    RingPlace<T> place(memory);
    place.split = static_cast<int>(cluster_rank());
    place.first_expert = static_cast<int>(blockIdx.x) / kSplits * T::kBlockExperts;
    place.tile_token = static_cast<int>(blockIdx.y) * T::kTokens;
    const bool brings_weights = threadIdx.x == T::kMultipliers;
    const bool brings_x = threadIdx.x == T::kMultipliers + kWarp;
    for (int part = 0; brings_x && part < T::kMeetings; ++part) {
        barrier_init(met(place, part), 1);
        barrier_init(laid(place, part), T::kMultipliers / kWarp * kWarpArrivals);
        barrier_arrive_expect(met(place, part), T::kRows * T::kPartExperts * 4);
    }
    if (brings_weights || brings_x) {
        place.prepare(args, brings_x);
    }
    __syncthreads();
    cluster_arrive();
    const uint32_t room = shared_address(place.room(memory));
    float* logits = place.begin_of_ring(memory);
    if (threadIdx.x < T::kMultipliers) {
        if constexpr (T::kChooses) {
            registers_take<232>();
        }
        end_tokens<true>(args, place, room, logits, rooms);
    } else {
        if constexpr (T::kChooses) {
            registers_give<88>();
        }
        if (brings_weights) {
            bring_weights<T>(args, place);
        } else if (brings_x) {
            bring_x<T>(args, place);
        }
        __syncwarp();
        if constexpr (T::kChooses) {
            end_tokens<false>(args, place, room, logits, rooms);
        } else {
            cluster_wait();
        }
    }
    if constexpr (kAllArrive) {  // racecheck does not see that a block waits for the other's sums
        __syncwarp();
        cluster_sync();
    }
}

template <typename T>
void launch(cudaStream_t stream, const RouterLogitsCudaArgs& product, const RouterTopkCudaArgs& choice) {
    const RingArgs args = ring_args<T>(product, choice);
    const auto kernel = router_pairs_kernel<T>;
    cuda_check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, T::kSharedBytes));
    const auto tiles = [](int64_t count, int tile) {
        return static_cast<unsigned>((count + tile - 1) / tile);
    };
    const dim3 grid(kSplits * tiles(product.experts, T::kBlockExperts), tiles(product.tokens, T::kTokens));
    cuda_check(launch_dependent({grid, T::kThreads, T::kSharedBytes, stream, kSplits}, kernel, args));
}

}  // namespace

bool router_pairs_serves(const RouterLogitsCudaArgs& args) {
    return !args.deterministic && args.tokens > kRouterMiddleTokens && args.tokens <= kRouterPairsTokens &&
           args.sm_count >= kMinMultiprocessors &&
           router_middle_workspace_bytes(args.experts, args.width) > 0;
}

void launch_router_pairs(cudaStream_t stream, const RouterLogitsCudaArgs& product,
                         const RouterTopkCudaArgs& choice) {
    if (product.low == nullptr) {
        launch<Tile<1, kMeetExperts, 3, 4, false, 450>>(stream, product, choice);
    } else if (choice.chosen != nullptr) {
        launch<Tile<1, kMeetExperts, 3, 4, true, 0>>(stream, product, choice);
    } else {
        launch<Tile<2, kMeetExperts / 2, 0, 2, true, 900>>(stream, product, choice);
    }
}

}  // namespace tessera::cuda

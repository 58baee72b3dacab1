#include <algorithm>

#include "base/check.h"
#include "device/cuda/cuda_check.h"
#include "ops/common/cuda/async_copy.cuh"
#include "ops/common/cuda/cluster.cuh"
#include "ops/common/cuda/dependent_launch.cuh"
#include "ops/common/cuda/reduce.cuh"
#include "ops/common/cuda/tensor_map.h"
#include "ops/common/cuda/wgmma_shapes.cuh"
#include "ops/router_topk/cuda/router_kernels.cuh"
#include "ops/router_topk/cuda/router_meet.cuh"

namespace tessera::cuda {
namespace {

constexpr int kSplitsMax = 8;      // of the width, each summed on its own
constexpr int kStageColumns = 64;  // 128 bytes of each row
constexpr int kRowBytes = 128;
constexpr int kStepsAStage = 4;
constexpr int kSharedMax = 222 * 1024;
constexpr int kBarrierBytes = 1024;

// A block's tile: Groups warpgroups of 64 tokens, Experts experts.
template <int Groups, int Experts, bool Low>
struct Tile {
    static constexpr int kTokens = 64 * Groups;
    static constexpr int kExperts = Experts;
    static constexpr int kConsumers = 128 * Groups;
    static constexpr bool kMovesRegisters =
        kConsumers * Experts > 128 * 192;  // two sets of sums do not fit else
    static constexpr int kThreads = kConsumers + (kMovesRegisters ? 128 : kWarp);
    static constexpr int kXBytes = kTokens * kRowBytes;
    static constexpr int kWeightBytes = Experts * kRowBytes;
    static constexpr int kStageBytes = kXBytes + (Low ? 2 : 1) * kWeightBytes;
    // Two blocks fit a multiprocessor where the tile is small: then the next kernel's begin hides behind this
    // one's end.
    static constexpr int kBlocks = kStageBytes <= 32 * 1024 ? 2 : 1;
    static constexpr int kStages = std::min(8, (kSharedMax / kBlocks - 2 * kBarrierBytes) / kStageBytes);
    static constexpr int kPitch = Experts + 8;  // floats between the tokens' sums: stores hit all banks
    static constexpr int kSharedBytes = kBarrierBytes + 1024 + kStages * kStageBytes;
    static_assert(kTokens * kPitch * 4 <= kStages * kStageBytes);
};

struct ManyArgs {
    CUtensorMap x, high, low;
    float* logits = nullptr;
    int64_t logits_stride = 0;
    int tokens = 0;
    int experts = 0;
    int stages = 0;  // of the whole width
    int splits = 0;  // blocks of a cluster along the width
    int chunks = 0;
};

// Where a block works, and its ring of stages.
template <typename T>
struct Place {
    uint32_t barriers;
    uint32_t ring;

    __device__ uint32_t full(int stage) const { return barriers + 8 * stage; }
    __device__ uint32_t empty(int stage) const { return barriers + 8 * (T::kStages + stage); }
    __device__ uint32_t x(int stage) const { return ring + stage * T::kStageBytes; }
    __device__ uint32_t high(int stage) const { return x(stage) + T::kXBytes; }
    __device__ uint32_t low(int stage) const { return high(stage) + T::kWeightBytes; }
};

// A block's part of the width is summed in `chunks` pieces, each by the tensor cores. Piece c of block r
// begins here.
__device__ __forceinline__ int chunk_begin(const ManyArgs& args, int chunk) {
    return (static_cast<int>(blockIdx.x) * args.chunks + chunk) * args.stages / (args.splits * args.chunks);
}

template <typename T, bool Low>
__device__ __forceinline__ void bring_weights(const ManyArgs& args, const Place<T>& place, int slot,
                                              int column) {
    const int expert = static_cast<int>(blockIdx.z) * T::kExperts;
    copy_box(place.high(slot), &args.high, column, expert, place.full(slot));
    if constexpr (Low) {
        copy_box(place.low(slot), &args.low, column, expert, place.full(slot));
    }
}

// One thread fills the ring. The first round's weights do not wait for the kernel before.
template <typename T, bool Low>
__device__ __forceinline__ void produce(const ManyArgs& args, const Place<T>& place, int begin, int end) {
    const int token = static_cast<int>(blockIdx.y) * T::kTokens;
    const int first = min(end - begin, T::kStages);
    for (int i = 0; i < first; ++i) {
        barrier_arrive_expect(place.full(i), T::kStageBytes);
        bring_weights<T, Low>(args, place, i, (begin + i) * kStageColumns);
    }
    wait_for_previous_kernel();
    let_next_kernel_start();
    for (int i = 0; i < first; ++i) {
        copy_box(place.x(i), &args.x, (begin + i) * kStageColumns, token, place.full(i));
    }
    for (int i = first; begin + i < end; ++i) {
        const int slot = i % T::kStages;
        barrier_wait(place.empty(slot), static_cast<uint32_t>(i / T::kStages - 1) & 1);
        barrier_arrive_expect(place.full(slot), T::kStageBytes);
        bring_weights<T, Low>(args, place, slot, (begin + i) * kStageColumns);
        copy_box(place.x(slot), &args.x, (begin + i) * kStageColumns, token, place.full(slot));
    }
}

template <typename T>
__device__ __forceinline__ void release(const Place<T>& place, int slot) {
    if (threadIdx.x % kWarp == 0) {
        barrier_arrive(place.empty(slot));
    }
}

// A warpgroup's sums over stages [begin, end); `before`: stages of the ring used before.
template <typename T, bool Low>
__device__ __forceinline__ void multiply(const Place<T>& place, int before, int count,
                                         float (&sums)[T::kExperts / 2]) {
    const uint32_t rows = threadIdx.x / 128 * 64 * kRowBytes;
    for (int i = 0; i < count; ++i) {
        const int slot = (before + i) % T::kStages;
        barrier_wait(place.full(slot), static_cast<uint32_t>((before + i) / T::kStages) & 1);
        mma_pin(sums);
        mma_begin();
#pragma unroll
        for (int step = 0; step < kStepsAStage; ++step) {
            const uint64_t x = mma_descriptor(place.x(slot) + rows + step * kMmaStepBytes);
            mma_shared<false>(sums, x, mma_descriptor(place.high(slot) + step * kMmaStepBytes),
                              i + step > 0 ? 1 : 0);
            if constexpr (Low) {
                mma_shared<false>(sums, x, mma_descriptor(place.low(slot) + step * kMmaStepBytes), 1);
            }
        }
        mma_commit();
        mma_wait<1>();
        mma_pin(sums);
        if (i > 0) {
            release(place, (before + i - 1) % T::kStages);
        }
    }
    mma_wait<0>();
    mma_pin(sums);
    release(place, (before + count - 1) % T::kStages);
}

// The warpgroup's sums to shared memory, [tokens][kPitch].
template <typename T>
__device__ __forceinline__ void publish(const float (&sums)[T::kExperts / 2], float* to) {
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
    const int row = static_cast<int>(threadIdx.x) / kWarp * 16 + lane / 4;
#pragma unroll
    for (int j = 0; j < T::kExperts / 8; ++j) {
        float* place = to + row * T::kPitch + 8 * j + 2 * (lane % 4);
        *reinterpret_cast<float2*>(place) = {sums[4 * j], sums[4 * j + 1]};
        *reinterpret_cast<float2*>(place + 8 * T::kPitch) = {sums[4 * j + 2], sums[4 * j + 3]};
    }
}

// The cluster's sums of this block's share of the tokens, neighbours first: clusters of eight and of four,
// whose blocks add two chunks, have one order.
template <typename T>
__device__ __forceinline__ void combine(const ManyArgs& args, uint32_t sums) {
    const int share = (T::kTokens + args.splits - 1) / args.splits;
    const int row0 = static_cast<int>(blockIdx.x) * share;
    const int rows = min(share, T::kTokens - row0);
    for (int i = static_cast<int>(threadIdx.x); i < rows * (T::kExperts / 4); i += T::kConsumers) {
        const int row = row0 + i / (T::kExperts / 4);
        const int column = i % (T::kExperts / 4) * 4;
        const int token = static_cast<int>(blockIdx.y) * T::kTokens + row;
        const int expert = static_cast<int>(blockIdx.z) * T::kExperts + column;
        if (token >= args.tokens || expert >= args.experts) {
            continue;
        }
        const uint32_t from = sums + static_cast<uint32_t>(row * T::kPitch + column) * 4;
        float4 v[kSplitsMax];
#pragma unroll
        for (int block = 0; block < kSplitsMax; ++block) {
            v[block] =
                block < args.splits ? load_float4_from_block(from, static_cast<uint32_t>(block)) : float4{};
        }
#pragma unroll
        for (int width = 1; width < kSplitsMax; width *= 2) {
#pragma unroll
            for (int block = 0; block < kSplitsMax; block += 2 * width) {
                v[block] = v[block] + v[block + width];
            }
        }
        store_logits(args.logits + token * args.logits_stride, expert, args.experts,
                     args.logits_stride % 4 == 0, v[0]);
    }
}

// Roofline at 192 experts of width 4096: 1.6 or 3.1 MFLOP a token on the tensor cores (one or two products),
// 8 KB of x: at 800 TFLOP/s and 4.27 TB/s 4,096 tokens take 8 us by either, or 16. Clusters cut the width, so
// that a thousand tokens fill the machine; the sums of an eighth of the width are made by the tensor cores in
// float32, those of the eighths added in one order.
template <int Groups, int Experts, bool Low>
__global__ void __launch_bounds__(Tile<Groups, Experts, Low>::kThreads, 1)
    router_many_kernel(const __grid_constant__ ManyArgs args) {
    using T = Tile<Groups, Experts, Low>;
    extern __shared__ std::byte memory[];
    const uint32_t base = shared_address(memory);
    const Place<T> place{base, (base + kBarrierBytes + 1023) / 1024 * 1024};
    if (threadIdx.x == 0) {
        for (int stage = 0; stage < T::kStages; ++stage) {
            barrier_init(place.full(stage), 1);
            barrier_init(place.empty(stage), 4 * Groups);
        }
        barrier_init_fence();
    }
    __syncthreads();
    const int begin = chunk_begin(args, 0);
    if (threadIdx.x >= T::kConsumers) {
        if constexpr (T::kMovesRegisters) {
            registers_give<40>();
        }
        if (threadIdx.x == T::kConsumers) {
            produce<T, Low>(args, place, begin, chunk_begin(args, args.chunks));
        }
        __syncwarp();
        cluster_sync();
        cluster_sync();
    } else {
        if constexpr (T::kMovesRegisters) {
            registers_take<232>();
        }
        float sums[Experts / 2];
        int end = chunk_begin(args, 1);
        multiply<T, Low>(place, 0, end - begin, sums);
        for (int chunk = 1; chunk < args.chunks; ++chunk) {
            const int from = end;
            end = chunk_begin(args, chunk + 1);
            float more[Experts / 2];
            multiply<T, Low>(place, from - begin, end - from, more);
#pragma unroll
            for (int i = 0; i < Experts / 2; ++i) {
                sums[i] += more[i];
            }
        }
        group_barrier(1, T::kConsumers);  // the ring is free
        publish<T>(sums, reinterpret_cast<float*>(memory + (place.ring - base)));
        cluster_sync();
        wait_for_previous_kernel();
        combine<T>(args, place.ring);
        cluster_sync();  // nobody leaves while others read its sums
    }
}

template <int Groups, int Experts, bool Low>
void launch(cudaStream_t stream, const RouterLogitsCudaArgs& product, int splits) {
    using T = Tile<Groups, Experts, Low>;
    ManyArgs args{
        .x = make_tensor_map(product.x, {.dtype = DType::kBFloat16,
                                         .rank = 2,
                                         .sizes = {product.width, product.tokens},
                                         .strides = {product.x_stride * 2},
                                         .box = {T::kTokens}}),
        .high = make_tensor_map(product.high, DType::kBFloat16, product.experts, product.width, Experts),
        .logits = product.logits,
        .logits_stride = product.logits_stride,
        .tokens = static_cast<int>(product.tokens),
        .experts = static_cast<int>(product.experts),
        .stages = static_cast<int>((product.width + kStageColumns - 1) / kStageColumns),
        .splits = splits,
        .chunks = std::max(1, kSplitsMax / splits)};
    args.low = Low ? make_tensor_map(product.low, DType::kBFloat16, product.experts, product.width, Experts)
                   : args.high;
    const auto kernel = router_many_kernel<Groups, Experts, Low>;
    cuda_check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, T::kSharedBytes));
    const int64_t tiles = (product.tokens + T::kTokens - 1) / T::kTokens;
    const dim3 grid(static_cast<unsigned>(splits), static_cast<unsigned>(tiles),
                    static_cast<unsigned>((product.experts + Experts - 1) / Experts));
    cudaLaunchAttribute attributes[2]{};
    attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[0].val.programmaticStreamSerializationAllowed = 1;
    attributes[1].id = cudaLaunchAttributeClusterDimension;
    attributes[1].val.clusterDim = {static_cast<unsigned>(splits), 1, 1};
    cudaLaunchConfig_t config{};
    config.gridDim = grid;
    config.blockDim = dim3(T::kThreads);
    config.dynamicSmemBytes = T::kSharedBytes;
    config.stream = stream;
    config.attrs = attributes;
    config.numAttrs = 2;
    cuda_check(cudaLaunchKernelEx(&config, kernel, args));
}

// Clusters of 1, 2, ... blocks that an H200 holds at once, one block a multiprocessor, as
// cudaOccupancyMaxActiveClusters() says: a cluster does not cross the groups of its multiprocessors.
constexpr int kClusters[kSplitsMax] = {132, 66, 39, 30, 22, 17, 15, 15};

// Into how many blocks to cut the width: rounds of clusters, each of which takes a start and an end (a
// seventh of the time of one product of the whole width) beside its share of the products.
int choose_splits(int64_t tiles, int products) {
    int best = 1;
    double best_time = 1e30;
    for (int splits = 1; splits <= kSplitsMax; ++splits) {
        const int64_t rounds = (tiles + kClusters[splits - 1] - 1) / kClusters[splits - 1];
        const double time = static_cast<double>(rounds) * (1.0 / 7 + 1.0 * products / splits);
        if (time < best_time) {
            best_time = time;
            best = splits;
        }
    }
    return best;
}

// With clusters of eight and of four a token's bits are one.
template <bool Low>
void launch_tile(cudaStream_t stream, const RouterLogitsCudaArgs& args) {
    constexpr int kProducts = Low ? 2 : 1;
    const bool small = args.tokens <= 512;
    const int64_t tile = small ? 64 : 128;
    int splits = choose_splits((args.tokens + tile - 1) / tile * (small ? 2 : 1), kProducts);
    if (args.deterministic) {
        splits = args.tokens <= 1024 ? kSplitsMax : kSplitsMax / 2;
    }
    if (small) {
        launch<1, 96, Low>(stream, args, splits);
    } else {
        launch<2, 192, Low>(stream, args, splits);
    }
}

}  // namespace

bool router_many_serves(const RouterLogitsCudaArgs& args) {
    return args.width % kStageColumns == 0 && args.width / kStageColumns >= kSplitsMax;
}

void launch_router_many(cudaStream_t stream, const RouterLogitsCudaArgs& args) {
    if (args.low != nullptr) {
        launch_tile<true>(stream, args);
    } else {
        launch_tile<false>(stream, args);
    }
}

}  // namespace tessera::cuda

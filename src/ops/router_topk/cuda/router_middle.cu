#include <algorithm>

#include "base/check.h"
#include "device/cuda/cuda_check.h"
#include "ops/common/cuda/async_copy.cuh"
#include "ops/common/cuda/cluster.cuh"
#include "ops/common/cuda/dependent_launch.cuh"
#include "ops/common/cuda/mma.cuh"
#include "ops/common/cuda/tensor_map.h"
#include "ops/common/cuda/wgmma_shapes.cuh"
#include "ops/router_topk/cuda/router_kernels.cuh"
#include "ops/router_topk/cuda/router_select.cuh"

namespace tessera::cuda {
namespace {

constexpr int kBlocks = 8;           // of a cluster: an eighth of the width each
constexpr int64_t kTokensMin = 257;  // fewer are faster in blocks of half of the experts, and a choice apart
constexpr int kClusters = 15;        // of 8 blocks, that an H200 holds at once
constexpr int kTokens = 64;          // of a cluster
constexpr int kExperts = 192;        // at most
constexpr int kGroupExperts = 96;    // of a warpgroup
constexpr int kConsumers = 256;      // threads of the two warpgroups: a warp ends one token of the block's 8
constexpr int kThreads = kConsumers + kWarp;
constexpr int kStageColumns = 64;  // 128 bytes of each row
constexpr int kRowBytes = 128;
constexpr int kStepsAStage = 4;
constexpr int kXBytes = kTokens * kRowBytes;
constexpr int kWeightBytes = kExperts * kRowBytes;
constexpr int kBarrierBytes = 1024;
constexpr int kPieces = kExperts / 4;  // of a token's sums: four experts each
constexpr int kTokenBytes = kPieces * 16;
constexpr int kPartBytes = kTokens / kBlocks * kTokenBytes;  // what a block gets from each
constexpr int kInboxBytes = kBlocks * kPartBytes;

template <bool Low>
struct Ring {
    static constexpr int kStageBytes = kXBytes + (Low ? 2 : 1) * kWeightBytes;
    static constexpr int kStages = (224 * 1024 - kInboxBytes - kBarrierBytes - 1024) / kStageBytes;
    static constexpr int kSharedBytes = kBarrierBytes + 1024 + kInboxBytes + kStages * kStageBytes;
    static_assert(8 * (2 * kStages + 1) <= kBarrierBytes);

    uint32_t barriers = 0;
    uint32_t inbox = 0;
    uint32_t stages = 0;

    __device__ uint32_t full(int stage) const { return barriers + 8 * stage; }
    __device__ uint32_t empty(int stage) const { return barriers + 8 * (kStages + stage); }
    __device__ uint32_t inbox_full() const { return barriers + 8 * 2 * kStages; }
    __device__ uint32_t x(int stage) const { return stages + stage * kStageBytes; }
    __device__ uint32_t high(int stage) const { return x(stage) + kXBytes; }
    __device__ uint32_t low(int stage) const { return high(stage) + kWeightBytes; }
};

struct MiddleArgs {
    CUtensorMap x, high, low;
    RouterTopkCudaArgs choice;
    int tokens = 0;
    int experts = 0;
    int stages = 0;  // of the whole width
};

// One thread fills the ring. The first round's weights do not wait for the kernel before.
template <bool Low>
__device__ __forceinline__ void produce(const MiddleArgs& args, const Ring<Low>& ring, int begin, int count) {
    const int token = static_cast<int>(blockIdx.y) * kTokens;
    const auto bring_weights = [&](int i, int slot) {
        barrier_arrive_expect(ring.full(slot), Ring<Low>::kStageBytes);
        copy_box(ring.high(slot), &args.high, (begin + i) * kStageColumns, 0, ring.full(slot));
        if constexpr (Low) {
            copy_box(ring.low(slot), &args.low, (begin + i) * kStageColumns, 0, ring.full(slot));
        }
    };
    const int first = min(count, Ring<Low>::kStages);
    for (int i = 0; i < first; ++i) {
        bring_weights(i, i);
    }
    wait_for_previous_kernel();
    let_next_kernel_start();
    for (int i = 0; i < count; ++i) {
        const int slot = i % Ring<Low>::kStages;
        if (i >= first) {
            barrier_wait(ring.empty(slot), static_cast<uint32_t>(i / Ring<Low>::kStages - 1) & 1);
            bring_weights(i, slot);
        }
        copy_box(ring.x(slot), &args.x, (begin + i) * kStageColumns, token, ring.full(slot));
    }
}

// A warpgroup's sums over the block's stages.
template <bool Low>
__device__ __forceinline__ void multiply(const Ring<Low>& ring, int group, int count,
                                         float (&sums)[kGroupExperts / 2]) {
    const uint32_t rows = static_cast<uint32_t>(group * kGroupExperts * kRowBytes);
    for (int i = 0; i < count; ++i) {
        const int slot = i % Ring<Low>::kStages;
        barrier_wait(ring.full(slot), static_cast<uint32_t>(i / Ring<Low>::kStages) & 1);
        mma_pin(sums);
        mma_begin();
#pragma unroll
        for (int step = 0; step < kStepsAStage; ++step) {
            const uint64_t x = mma_descriptor(ring.x(slot) + step * kMmaStepBytes);
            mma_shared<false>(sums, x, mma_descriptor(ring.high(slot) + rows + step * kMmaStepBytes),
                              i + step > 0 ? 1 : 0);
            if constexpr (Low) {
                mma_shared<false>(sums, x, mma_descriptor(ring.low(slot) + rows + step * kMmaStepBytes), 1);
            }
        }
        mma_commit();
        mma_wait<1>();
        mma_pin(sums);
        if (i > 0) {
            barrier_arrive_for_all(ring.empty((i - 1) % Ring<Low>::kStages), threadIdx.x % 128 == 0);
        }
    }
    mma_wait<0>();
    mma_pin(sums);
}

// Sends a warp's sums to the two blocks that end its tokens: rows 0 to 7 of its 16 to the one, the others to
// the next. Piece 24 g + 4 p + t of a token has from warpgroup g the experts 16 p + 2 t, the next, and those
// 8 further.
template <bool Low>
__device__ __forceinline__ void send(const Ring<Low>& ring, int group,
                                     const float (&sums)[kGroupExperts / 2]) {
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
    const int warp = static_cast<int>(threadIdx.x) % 128 / kWarp;
    const uint32_t place = ring.inbox + cluster_rank() * kPartBytes + lane / 4 * kTokenBytes +
                           (kPieces / 2 * group + lane % 4) * 16;
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const auto block = static_cast<uint32_t>(2 * warp + half);
        const uint32_t at = address_in_block(place, block);
        const uint32_t told = address_in_block(ring.inbox_full(), block);
#pragma unroll
        for (int p = 0; p < kGroupExperts / 16; ++p) {
            const int first = 8 * p + 2 * half;
            const float part[4] = {sums[first], sums[first + 1], sums[first + 4], sums[first + 5]};
            store_to_block(at + 64 * p, part, told);
        }
    }
}

// Four of a token's logits: the eighths' sums, neighbours first, as clusters of eight add them in
// router_many.cu.
__device__ __forceinline__ void add_up(uint32_t from, float (&logits)[4]) {
    float v[kBlocks][4];
#pragma unroll
    for (int block = 0; block < kBlocks; ++block) {
        const uint4 part = load_shared_16(from + block * kPartBytes);
        v[block][0] = __uint_as_float(part.x);
        v[block][1] = __uint_as_float(part.y);
        v[block][2] = __uint_as_float(part.z);
        v[block][3] = __uint_as_float(part.w);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        logits[i] = ((v[0][i] + v[1][i]) + (v[2][i] + v[3][i])) + ((v[4][i] + v[5][i]) + (v[6][i] + v[7][i]));
    }
}

// What a warp's choice needs beside the logits, loaded before they are there.
struct Beside {
    float bias[kExperts / kWarp];
    bool padding = false;

    __device__ __forceinline__ Beside(const MiddleArgs& args, int token) {
        const RouterTopkCudaArgs& choice = args.choice;
#pragma unroll
        for (int j = 0; j < kExperts / kWarp; ++j) {
            const int expert = static_cast<int>(threadIdx.x) % kWarp + kWarp * j;
            bias[j] = choice.bias != nullptr && expert < args.experts ? choice.bias[expert] : 0;
        }
        padding = choice.positions != nullptr && token < args.tokens && choice.positions[token] < 0;
    }
};

// Room of a warp.
struct alignas(16) Room {
    float logits[kExperts];
    SelectRoom select;
};

// By a warp: one token's logits, and its choice. inbox: of the token.
__device__ __forceinline__ void finish(const MiddleArgs& args, const Beside& beside, uint32_t inbox,
                                       int token, Room& room) {
    constexpr int kPerLane = kExperts / kWarp;
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
    for (int piece = lane; piece < kPieces; piece += kWarp) {
        float logits[4];
        add_up(inbox + piece * 16, logits);
        float* to = room.logits + piece / (kPieces / 2) * kGroupExperts + piece % (kPieces / 2) / 4 * 16 +
                    piece % 4 * 2;
        *reinterpret_cast<float2*>(to) = make_float2(logits[0], logits[1]);
        *reinterpret_cast<float2*>(to + 8) = make_float2(logits[2], logits[3]);
    }
    __syncwarp();
    if (beside.padding) {
        return select_nothing(args.choice, token, lane);
    }
    float logits[kPerLane];
#pragma unroll
    for (int j = 0; j < kPerLane; ++j) {
        logits[j] = room.logits[lane + kWarp * j];
    }
    ExpertScore scores[kPerLane];
    score_experts(logits, beside.bias, scores);
#pragma unroll
    for (int j = 0; j < kPerLane; ++j) {
        if (lane + kWarp * j >= args.experts) {
            scores[j] = {};
        }
    }
    select_experts(args.choice, token, scores, room.select);
}

// Roofline as router_many's; what counts for some hundred tokens is the number of steps one after the other.
// A cluster of eight blocks makes 64 tokens, each block an eighth of the width for all experts; then every
// block ends eight tokens, a warp each, which have all their logits in its shared memory and are chosen for
// at once. Sums are sent to where they are added up, and a barrier there counts them: no block waits for
// another's end.
template <bool Low>
__global__ void __launch_bounds__(kThreads, 1) router_middle_kernel(const __grid_constant__ MiddleArgs args) {
    extern __shared__ std::byte memory[];
    __shared__ Room rooms[kConsumers / kWarp];
    const uint32_t base = shared_address(memory);
    Ring<Low> ring;
    ring.barriers = base;
    ring.stages = (base + kBarrierBytes + 1023) / 1024 * 1024;
    ring.inbox = ring.stages + Ring<Low>::kStages * Ring<Low>::kStageBytes;
    if (threadIdx.x == kConsumers) {
        for (int stage = 0; stage < Ring<Low>::kStages; ++stage) {
            barrier_init(ring.full(stage), 1);
            barrier_init(ring.empty(stage), 2 * kGroupArrivals);
        }
        barrier_init(ring.inbox_full(), 1);
        barrier_init_fence();
        barrier_arrive_expect(ring.inbox_full(), kInboxBytes);
    }
    __syncthreads();
    cluster_arrive();
    const int rank = static_cast<int>(cluster_rank());
    const int begin = rank * args.stages / kBlocks;
    const int count = (rank + 1) * args.stages / kBlocks - begin;
    if (threadIdx.x >= kConsumers) {
        if (threadIdx.x == kConsumers) {
            produce<Low>(args, ring, begin, count);
        }
        __syncwarp();
        cluster_wait();
        return;
    }
    const int group = static_cast<int>(threadIdx.x) / 128;
    float sums[kGroupExperts / 2];
    multiply<Low>(ring, group, count, sums);
    cluster_wait();  // all barriers are ready
    send<Low>(ring, group, sums);
    const int warp = static_cast<int>(threadIdx.x) / kWarp;
    const int token = static_cast<int>(blockIdx.y) * kTokens + rank * (kTokens / kBlocks) + warp;
    wait_for_previous_kernel();
    const Beside beside(args, token);
    barrier_wait(ring.inbox_full(), 0);
    if (token < args.tokens) {
        finish(args, beside, ring.inbox + static_cast<uint32_t>(warp) * kTokenBytes, token, rooms[warp]);
    }
}

template <bool Low>
void launch(cudaStream_t stream, const RouterLogitsCudaArgs& product, const RouterTopkCudaArgs& choice) {
    MiddleArgs args{
        .x = make_tensor_map(product.x, {.dtype = DType::kBFloat16,
                                         .rank = 2,
                                         .sizes = {product.width, product.tokens},
                                         .strides = {product.x_stride * 2},
                                         .box = {kTokens}}),
        .high = make_tensor_map(product.high, DType::kBFloat16, product.experts, product.width, kExperts),
        .choice = choice,
        .tokens = static_cast<int>(product.tokens),
        .experts = static_cast<int>(product.experts),
        .stages = static_cast<int>((product.width + kStageColumns - 1) / kStageColumns)};
    args.low = Low ? make_tensor_map(product.low, DType::kBFloat16, product.experts, product.width, kExperts)
                   : args.high;
    const auto kernel = router_middle_kernel<Low>;
    cuda_check(
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Ring<Low>::kSharedBytes));
    const dim3 grid(kBlocks, static_cast<unsigned>((product.tokens + kTokens - 1) / kTokens));
    cuda_check(launch_dependent({.grid = grid,
                                 .threads = kThreads,
                                 .shared_bytes = Ring<Low>::kSharedBytes,
                                 .stream = stream,
                                 .cluster = kBlocks},
                                kernel, args));
}

}  // namespace

bool router_middle_serves(const RouterLogitsCudaArgs& args) {
    return args.tokens >= kTokensMin && args.tokens <= kClusters * kTokens && args.experts <= kExperts &&
           args.width % kStageColumns == 0 && args.width / kStageColumns >= kBlocks;
}

void launch_router_middle(cudaStream_t stream, const RouterLogitsCudaArgs& product,
                          const RouterTopkCudaArgs& choice) {
    if (product.low != nullptr) {
        launch<true>(stream, product, choice);
    } else {
        launch<false>(stream, product, choice);
    }
}

}  // namespace tessera::cuda

#include <algorithm>
#include <iterator>

#include "base/check.h"
#include "device/cuda/cuda_check.h"
#include "ops/common/cuda/dependent_launch.cuh"
#include "ops/common/cuda/mma.cuh"
#include "ops/router_topk/cuda/router_kernels.cuh"
#include "ops/router_topk/cuda/router_meet.cuh"

namespace tessera::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarp;
constexpr int kSlice = 512;                  // of the width, in one block
constexpr int kShare = kSlice / kWarps;      // of the slice, in one warp
constexpr int kVectors = kShare / 32;        // of 8 elements, of a row in one lane
constexpr int kExperts = 16;                 // of a block
constexpr int kPartialPitch = kExperts + 4;  // floats between tokens: a warp's stores hit all banks
constexpr int kSlicesMax = 32;
constexpr int64_t kFasterTokens = 24;     // up to which this is faster than router_middle
constexpr int kSharedBytes = 118 * 1024;  // over half: two blocks on one multiprocessor would finish last

struct FewArgs {
    RouterLogitsCudaArgs product;
    RouterTopkCudaArgs choice;  // without a place for it, the logits are stored
    int slices = 0;
};

// A lane's part of a row: 8 elements from each 32. The matrix instructions multiply whatever elements the
// lanes hold at the same places of both operands, so that nothing needs to be rearranged.
struct Row {
    uint32_t words[kVectors][4];
};
__device__ __forceinline__ Row load_row(const __nv_bfloat16* from) {
    Row row;
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
        const uint4 raw = *reinterpret_cast<const uint4*>(from + 32 * v);
        row.words[v][0] = raw.x, row.words[v][1] = raw.y, row.words[v][2] = raw.z, row.words[v][3] = raw.w;
    }
    return row;
}
// 16 experts in two rows, 8 tokens.
__device__ __forceinline__ void multiply(float (&sums)[4], const Row (&experts)[2], const Row& tokens) {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
#pragma unroll
        for (int half = 0; half < 4; half += 2) {
            const uint32_t a[4] = {experts[0].words[v][half], experts[1].words[v][half],
                                   experts[0].words[v][half + 1], experts[1].words[v][half + 1]};
            mma_16x8<false>(sums, a, tokens.words[v][half], tokens.words[v][half + 1]);
        }
    }
}

// The warp's share of the slice: its sums of every token and expert to `partial`, [8 Tiles][kPartialPitch].
// The weights do not wait for the kernel before.
template <bool Low, int Tiles>
__device__ __forceinline__ void multiply_share(const RouterLogitsCudaArgs& args, float* partial) {
    const int lane = static_cast<int>(threadIdx.x) % kWarp;
    const int warp = static_cast<int>(threadIdx.x) / kWarp;
    const int64_t column = blockIdx.x * static_cast<int64_t>(kSlice) + warp * kShare + lane % 4 * 8;
    const int64_t weight_place =
        (blockIdx.y * static_cast<int64_t>(kExperts) + lane / 4) * args.width + column;
    const Row high[2] = {load_row(args.high + weight_place),
                         load_row(args.high + weight_place + 8 * args.width)};
    Row low[2];
    if constexpr (Low) {
        low[0] = load_row(args.low + weight_place);
        low[1] = load_row(args.low + weight_place + 8 * args.width);
    }
    wait_for_previous_kernel();
    let_next_kernel_start();
    Row x[Tiles];
#pragma unroll
    for (int t = 0; t < Tiles; ++t) {  // beyond the last token: the last again
        const int64_t token = min(static_cast<int64_t>(8 * t + lane / 4), args.tokens - 1);
        x[t] = load_row(args.x + token * args.x_stride + column);
    }
#pragma unroll
    for (int t = 0; t < Tiles; ++t) {
        float sums[4] = {};
        multiply(sums, high, x[t]);
        if constexpr (Low) {
            multiply(sums, low, x[t]);
        }
        float* to = partial + (8 * t + lane % 4 * 2) * kPartialPitch + lane / 4;
        to[0] = sums[0];
        to[kPartialPitch] = sums[1];
        to[8] = sums[2];
        to[kPartialPitch + 8] = sums[3];
    }
}

__device__ __forceinline__ float tree(const float (&v)[8]) {
    return ((v[0] + v[1]) + (v[2] + v[3])) + ((v[4] + v[5]) + (v[6] + v[7]));
}

// The block's sums to the workspace, [tokens][slices][experts].
template <int Tiles>
__device__ __forceinline__ void publish(const FewArgs& args, const float* partial) {
    auto* sums = reinterpret_cast<uint32_t*>(args.product.workspace);
    for (int i = static_cast<int>(threadIdx.x); i < args.product.tokens * kExperts; i += kThreads) {
        const int token = i / kExperts;
        const int expert = i % kExperts;
        float v[kWarps];
#pragma unroll
        for (int warp = 0; warp < kWarps; ++warp) {
            v[warp] = partial[(warp * 8 * Tiles + token) * kPartialPitch + expert];
        }
        const float sum = tree(v);
        const int64_t place =
            (token * static_cast<int64_t>(args.slices) + blockIdx.x) * args.product.experts +
            blockIdx.y * kExperts + expert;
        store_relaxed(sums + place, present(sum));
    }
}

// Waits for the slices' sums of one logit, and takes them out of the workspace.
__device__ __forceinline__ float collect(const FewArgs& args, int64_t token, int expert) {
    auto* from = reinterpret_cast<uint32_t*>(args.product.workspace) +
                 token * args.slices * args.product.experts + expert;
    float sum = 0;
    for (int first = 0; first < args.slices; first += 8) {
        float v[8] = {};
        bool absent = true;
        while (absent) {
            absent = false;
#pragma unroll
            for (int i = 0; i < 8; ++i) {
                if (first + i < args.slices) {
                    const uint32_t bits = load_relaxed(from + (first + i) * args.product.experts);
                    absent = absent || bits == kAbsent;
                    v[i] = __uint_as_float(bits);
                }
            }
        }
#pragma unroll
        for (int i = 0; i < 8; ++i) {
            if (first + i < args.slices) {
                from[(first + i) * args.product.experts] = kAbsent;
            }
        }
        sum += tree(v);
    }
    return sum;
}

template <int PerLane>
__device__ __forceinline__ void choose(const FewArgs& args, int64_t token, const ExpertScore* scores,
                                       SelectRoom& room) {
    const int lane = static_cast<int>(threadIdx.x);
    ExpertScore mine[PerLane];
#pragma unroll
    for (int j = 0; j < PerLane; ++j) {
        const int expert = lane + kWarp * j;
        if (expert < args.choice.experts) {
            mine[j] = scores[expert];
        }
    }
    select_experts(args.choice, token, mine, room);
}

// Roofline at 192 experts of width 4096: 1.5 or 3 MB of weights (0.4 or 0.8 us), the rest is latency. The
// blocks cut the width as well as the experts, so that as many as possible read; block t then makes the
// logits and the choice of token t. A sum in the workspace is its own flag, which saves a fence and a counter
// between the two: all blocks are on the device at once (router_few_serves()), so those that wait do not keep
// others out.
template <bool Low, int Tiles, int PerLane>
__global__ void __launch_bounds__(kThreads, 1) router_few_kernel(FewArgs args) {
    extern __shared__ float partial[];  // [kWarps][8 Tiles][kPartialPitch]
    __shared__ ExpertScore scores[kRouterCudaExpertsMax];
    __shared__ SelectRoom select;
    const int tokens = static_cast<int>(args.product.tokens);
    multiply_share<Low, Tiles>(args.product, partial + threadIdx.x / kWarp * 8 * Tiles * kPartialPitch);
    __syncthreads();
    publish<Tiles>(args, partial);
    const int blocks = static_cast<int>(gridDim.x * gridDim.y);
    for (int token = static_cast<int>(blockIdx.x + gridDim.x * blockIdx.y); token < tokens; token += blocks) {
        const RouterTopkCudaArgs& choice = args.choice;
        const bool padding = choice.positions != nullptr && choice.positions[token] < 0;
        const int experts = static_cast<int>(args.product.experts);
        for (int expert = static_cast<int>(threadIdx.x); expert < experts; expert += kThreads) {
            const float bias[1] = {choice.bias != nullptr ? choice.bias[expert] : 0};
            const float logit[1] = {collect(args, token, expert)};
            if (choice.chosen == nullptr) {
                args.product.logits[token * args.product.logits_stride + expert] = logit[0];
            } else {
                ExpertScore score[1];
                score_experts(logit, bias, score);
                scores[expert] = score[0];
            }
        }
        if (choice.chosen != nullptr) {
            __syncthreads();
            if (threadIdx.x < kWarp && padding) {
                select_nothing(choice, token, static_cast<int>(threadIdx.x));
            } else if (threadIdx.x < kWarp) {
                choose<PerLane>(args, token, scores, select);
            }
            __syncthreads();
        }
    }
}

struct Variant {
    int64_t tokens_max;
    int64_t experts_max;
    void (*kernels[2])(FewArgs);  // one and two products
};
constexpr Variant kVariants[] = {
    {8, 192, {router_few_kernel<false, 1, 6>, router_few_kernel<true, 1, 6>}},
    {32, 192, {router_few_kernel<false, 4, 6>, router_few_kernel<true, 4, 6>}},
    {64, 192, {router_few_kernel<false, 8, 6>, router_few_kernel<true, 8, 6>}},
    {64, kRouterCudaExpertsMax, {router_few_kernel<false, 8, 16>, router_few_kernel<true, 8, 16>}},
};

}  // namespace

bool router_few_serves(const RouterLogitsCudaArgs& args) {
    return !args.deterministic && args.workspace != nullptr && args.tokens <= kRouterFewTokens &&
           args.width % kSlice == 0 && args.width / kSlice <= kSlicesMax && args.experts % kExperts == 0 &&
           args.experts <= kRouterCudaExpertsMax &&
           args.experts / kExperts * (args.width / kSlice) <= args.sm_count &&
           (args.tokens <= kFasterTokens || !router_middle_serves(args));
}

void launch_router_few(cudaStream_t stream, const RouterLogitsCudaArgs& product,
                       const RouterTopkCudaArgs& choice) {
    const auto* variant = std::find_if(std::begin(kVariants), std::end(kVariants), [&](const Variant& v) {
        return product.tokens <= v.tokens_max && product.experts <= v.experts_max;
    });
    check(variant != std::end(kVariants), "router: more than few tokens");
    const auto kernel = variant->kernels[product.low != nullptr ? 1 : 0];
    static_assert(kWarps * kRouterFewTokens * kPartialPitch * sizeof(float) <= kSharedBytes);
    cuda_check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes));
    const FewArgs args{product, choice, static_cast<int>(product.width / kSlice)};
    const dim3 grid(static_cast<unsigned>(args.slices), static_cast<unsigned>(product.experts / kExperts));
    cuda_check(launch_dependent({grid, kThreads, kSharedBytes, stream}, kernel, args));
}

}  // namespace tessera::cuda

namespace tessera {

int64_t router_cuda_workspace_bytes(int64_t experts, int64_t width) {
    const int64_t few = cuda::kRouterFewTokens * experts * (width / cuda::kSlice) * 4;
    return std::max(few, cuda::router_middle_workspace_bytes(experts, width));
}

}  // namespace tessera

#include <algorithm>

#include "base/check.h"
#include "device/cuda/cuda_check.h"
#include "ops/common/cuda/convert.cuh"
#include "ops/common/cuda/tensor_map.h"
#include "ops/linear/cuda/linear_cuda.h"
#include "ops/moe/cuda/grouped_gemm.cuh"
#include "ops/moe/cuda/moe_cuda.h"

namespace tessera::cuda {
namespace {

constexpr int kExpertsMax = 1024;
constexpr int kSortThreads = 1024;
constexpr int kCombineThreads = 256;

// Rows of a tile: near the mean rows of an expert, so that few tiles are mostly empty and few experts need
// many.
int choose_tile(int64_t tokens, int64_t k, int64_t experts) {
    const int64_t mean = experts > 0 ? tokens * k / experts : tokens;
    return mean <= 12 ? 16 : mean <= 48 ? 64 : 128;
}

struct Layout {
    int tile = 0;
    int64_t routed_rows = 0;
    int64_t rows = 0;
    int64_t act_width = 0;
    int64_t counts = 0, items = 0, row_source = 0, slots = 0, x = 0, shared_x = 0, act = 0,
            out = 0;  // offsets
    int64_t bytes = 0;
};

Layout make_layout(const MoeCudaTensors& tensors, int64_t tokens, int64_t k) {
    Layout layout;
    layout.tile = choose_tile(tokens, k, tensors.experts);
    layout.routed_rows = tokens * k;
    layout.rows = layout.routed_rows + (tensors.shared_width > 0 ? tokens : 0);
    layout.act_width = std::max(tensors.width, tensors.shared_width);
    // Every expert may add one partly filled tile.
    const int64_t items = layout.rows / layout.tile + std::min(tensors.experts, layout.routed_rows) + 1;
    const bool fp8 = tensors.dtype == DType::kFloat8E4M3;
    const auto take = [&layout](int64_t bytes) {
        const int64_t at = layout.bytes;
        layout.bytes += (bytes + 255) / 256 * 256;
        return at;
    };
    layout.counts = take(2 * 4);
    layout.items = take(items * static_cast<int64_t>(sizeof(GemmItem)));
    layout.row_source = take(layout.rows * 4);
    layout.slots = take(layout.routed_rows * 4);
    layout.x = take(fp8 ? tokens * tensors.hidden : 0);
    layout.shared_x = take(fp8 ? tokens * tensors.hidden : 0);
    layout.act = take(layout.rows * layout.act_width * dtype_size(tensors.dtype));
    layout.out = take(layout.rows * tensors.hidden * 2);
    return layout;
}

struct SortArgs {
    const int32_t* chosen = nullptr;  // [tokens, k]
    int32_t tokens = 0;
    int32_t k = 0;
    int32_t experts = 0;
    int32_t tile = 0;
    bool shared = false;
    int32_t* counts = nullptr;  // [2]
    GemmItem* items = nullptr;
    int32_t* row_source = nullptr;  // [tokens * k + tokens]
    int32_t* slots = nullptr;       // [tokens * k]: the sorted row of each pair, -1 without one
};

// Inclusive prefix sum over the block's threads. `shared` holds one value a warp.
__device__ int block_prefix(int value, int* shared) {
    const int lane = threadIdx.x % 32;
    const int warp = threadIdx.x / 32;
    for (int offset = 1; offset < 32; offset *= 2) {
        const int other = __shfl_up_sync(0xFFFFFFFFu, value, offset);
        value += lane >= offset ? other : 0;
    }
    if (lane == 31) {
        shared[warp] = value;
    }
    __syncthreads();
    int before = 0;
    for (int w = 0; w < warp; ++w) {
        before += shared[w];
    }
    __syncthreads();
    return value + before;
}

// Counting sort of the pairs by expert, and the items that the GEMMs work through. One block: 64 tokens have
// 512 pairs, 4,096 tokens 32,768. Rows within an expert are in no fixed order; no result depends on it.
__global__ void __launch_bounds__(kSortThreads) sort_pairs(SortArgs args) {
    __shared__ int32_t count[kExpertsMax];
    __shared__ int32_t next[kExpertsMax];
    __shared__ int32_t warps[kSortThreads / 32];
    const int thread = static_cast<int>(threadIdx.x);
    const int pairs = args.tokens * args.k;
    count[thread] = 0;
    __syncthreads();
    for (int i = thread; i < pairs; i += kSortThreads) {
        const int expert = args.chosen[i];
        if (expert >= 0 && expert < args.experts) {
            atomicAdd(&count[expert], 1);
        }
    }
    __syncthreads();
    const int mine = count[thread];
    const int tiles = (mine + args.tile - 1) / args.tile;
    const int first = block_prefix(mine, warps) - mine;
    const int tiles_end = block_prefix(tiles, warps);
    next[thread] = first;
    for (int i = 0; i < tiles; ++i) {
        args.items[tiles_end - tiles + i] = {
            .expert = thread, .row = first + i * args.tile, .rows = min(args.tile, mine - i * args.tile)};
    }
    if (thread == kSortThreads - 1) {
        args.counts[0] = tiles_end;
        args.counts[1] = args.shared ? (args.tokens + args.tile - 1) / args.tile : 0;
        warps[0] = tiles_end;
    }
    __syncthreads();
    const int routed_items = warps[0];
    for (int i = thread; i < pairs; i += kSortThreads) {
        const int expert = args.chosen[i];
        int row = -1;
        if (expert >= 0 && expert < args.experts) {
            row = atomicAdd(&next[expert], 1);
            args.row_source[row] = i / args.k;
        }
        args.slots[i] = row;
    }
    if (!args.shared) {
        return;
    }
    for (int i = thread; i < args.tokens; i += kSortThreads) {
        args.row_source[pairs + i] = i;
        if (i % args.tile == 0) {
            args.items[routed_items + i / args.tile] = {
                .expert = args.experts, .row = pairs + i, .rows = min(args.tile, args.tokens - i)};
        }
    }
}

struct CombineArgs {
    const __nv_bfloat16* out = nullptr;  // [rows, hidden]
    const int32_t* slots = nullptr;      // [tokens, k]
    const float* weights = nullptr;      // [tokens, k]
    int32_t hidden = 0;
    int32_t k = 0;
    int32_t shared_row = -1;     // of token 0; -1 without a shared expert
    __nv_bfloat16* y = nullptr;  // [tokens, hidden]
};

// Reads k + 1 rows and y, writes y: tokens * (k + 3) * 2 * hidden bytes.
__global__ void __launch_bounds__(kCombineThreads) combine(CombineArgs args) {
    const int token = static_cast<int>(blockIdx.y);
    const int column = static_cast<int>(blockIdx.x * kCombineThreads + threadIdx.x) * 8;
    if (column >= args.hidden) {
        return;
    }
    float sum[8] = {};
#pragma unroll 8
    for (int i = 0; i < args.k; ++i) {
        const int row = args.slots[token * args.k + i];
        if (row >= 0) {
            float part[8];
            load_bf16x8(args.out + static_cast<int64_t>(row) * args.hidden + column, part);
            const float weight = args.weights[token * args.k + i];
#pragma unroll
            for (int c = 0; c < 8; ++c) {
                sum[c] = fmaf(weight, part[c], sum[c]);
            }
        }
    }
    if (args.shared_row >= 0) {
        float part[8];
        load_bf16x8(args.out + static_cast<int64_t>(args.shared_row + token) * args.hidden + column, part);
#pragma unroll
        for (int c = 0; c < 8; ++c) {
            sum[c] = round_bf16(sum[c]) + part[c];
        }
    }
    __nv_bfloat16* y = args.y + static_cast<int64_t>(token) * args.hidden + column;
    float residual[8];
    load_bf16x8(y, residual);
#pragma unroll
    for (int c = 0; c < 8; ++c) {
        residual[c] += round_bf16(sum[c]);
    }
    store_bf16x8(residual, y);
}

template <bool Fp8, int Tile, bool Swiglu>
void launch_tile(cudaStream_t stream, const GemmArgs& args, int blocks) {
    constexpr int kBytes = GemmLayout<Tile>::kBytes;
    cuda_check(cudaFuncSetAttribute(grouped_gemm<Fp8, Tile, Swiglu>,
                                    cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes));
    grouped_gemm<Fp8, Tile, Swiglu><<<static_cast<unsigned>(blocks), kGemmThreads, kBytes, stream>>>(args);
    cuda_check_launch();
}

template <bool Fp8, bool Swiglu>
void launch_gemm(cudaStream_t stream, const GemmArgs& args, int tile, int blocks) {
    if (tile == 16) {
        launch_tile<Fp8, 16, Swiglu>(stream, args, blocks);
    } else if (tile == 64) {
        launch_tile<Fp8, 64, Swiglu>(stream, args, blocks);
    } else {
        launch_tile<Fp8, 128, Swiglu>(stream, args, blocks);
    }
}

// Whether the routed and the shared experts read the same fp8 activations.
bool one_input(const MoeCudaTensors& t) {
    return t.experts == 0 || t.shared_width == 0 || t.input_scale == t.shared_input_scale;
}

template <bool Fp8>
void launch_gemms(cudaStream_t stream, const MoeCudaArgs& args, const Layout& layout) {
    const MoeCudaTensors& t = args.weights->tensors;
    const int32_t size = Fp8 ? 1 : 2;
    const auto* x = static_cast<const uint8_t*>(args.x);
    const auto* shared_x = x;
    if constexpr (Fp8) {
        x = args.x8 != nullptr ? args.x8 : reinterpret_cast<const uint8_t*>(args.workspace + layout.x);
        shared_x = one_input(t) ? x : reinterpret_cast<const uint8_t*>(args.workspace + layout.shared_x);
    }
    const int32_t hidden = static_cast<int32_t>(t.hidden);
    const int32_t act_stride = static_cast<int32_t>(layout.act_width) * size;
    GemmArgs gemm{.items = reinterpret_cast<const cuda::GemmItem*>(args.workspace + layout.items),
                  .item_counts = reinterpret_cast<const int32_t*>(args.workspace + layout.counts),
                  .row_source = reinterpret_cast<const int32_t*>(args.workspace + layout.row_source),
                  .experts = static_cast<int32_t>(t.experts),
                  .out = args.workspace + layout.act,
                  .out_stride = layout.act_width};
    gemm.routed = {.weights = args.weights->gate_up,
                   .x = x,
                   .x_stride = hidden * size,
                   .input_bytes = hidden * size,
                   .outputs = static_cast<int32_t>(t.width),
                   .scale = t.gate_up_scale,
                   .input_scale = t.input_scale,
                   .output_scale = t.down_input_scale};
    gemm.shared = {.weights = args.weights->shared_gate_up,
                   .x = shared_x,
                   .x_stride = hidden * size,
                   .input_bytes = hidden * size,
                   .outputs = static_cast<int32_t>(t.shared_width),
                   .scale = t.shared_gate_up_scale,
                   .input_scale = t.shared_input_scale,
                   .output_scale = t.shared_down_input_scale};
    launch_gemm<Fp8, true>(stream, gemm, layout.tile, args.sm_count);

    const auto* act = reinterpret_cast<const uint8_t*>(args.workspace + layout.act);
    gemm.row_source = nullptr;
    gemm.out = args.workspace + layout.out;
    gemm.out_stride = t.hidden;
    gemm.routed = {.weights = args.weights->down,
                   .x = act,
                   .x_stride = act_stride,
                   .input_bytes = static_cast<int32_t>(t.width) * size,
                   .outputs = hidden,
                   .scale = t.down_scale,
                   .input_scales = t.down_input_scale};
    gemm.shared = {.weights = args.weights->shared_down,
                   .x = act,
                   .x_stride = act_stride,
                   .input_bytes = static_cast<int32_t>(t.shared_width) * size,
                   .outputs = hidden,
                   .scale = t.shared_down_scale,
                   .input_scales = t.shared_down_input_scale};
    launch_gemm<Fp8, false>(stream, gemm, layout.tile, args.sm_count);
}

void quantise_inputs(cudaStream_t stream, const MoeCudaArgs& args, const Layout& layout) {
    const MoeCudaTensors& t = args.weights->tensors;
    const int64_t count = args.tokens * t.hidden;
    if (args.x8 == nullptr) {
        quantize_cuda(stream, {.x = args.x,
                               .count = count,
                               .scale = t.experts > 0 ? t.input_scale : t.shared_input_scale,
                               .y = args.workspace + layout.x});
    }
    if (!one_input(t)) {
        quantize_cuda(stream, {.x = args.x,
                               .count = count,
                               .scale = t.shared_input_scale,
                               .y = args.workspace + layout.shared_x});
    }
}

}  // namespace
}  // namespace tessera::cuda

namespace tessera {

MoeCudaWeights moe_cuda_bind(const MoeCudaTensors& tensors) {
    const MoeCudaTensors& t = tensors;
    check(t.experts >= 0 && t.experts <= cuda::kExpertsMax, "moe: at most 1024 experts");
    check(t.hidden % 16 == 0 && t.width % 16 == 0 && t.shared_width % 16 == 0,
          "moe: hidden and the experts' widths must be multiples of 16");
    check(t.dtype == DType::kBFloat16 || t.dtype == DType::kFloat8E4M3, "moe: bfloat16 or e4m3 weights only");
    MoeCudaWeights weights{.tensors = t};
    if (t.experts > 0) {
        weights.gate_up = cuda::make_tensor_map(t.gate_up, t.dtype, t.experts * 2 * t.width, t.hidden, 128);
        weights.down = cuda::make_tensor_map(t.down, t.dtype, t.experts * t.hidden, t.width, 128);
    }
    if (t.shared_width > 0) {
        weights.shared_gate_up =
            cuda::make_tensor_map(t.shared_gate_up, t.dtype, 2 * t.shared_width, t.hidden, 128);
        weights.shared_down = cuda::make_tensor_map(t.shared_down, t.dtype, t.hidden, t.shared_width, 128);
    }
    return weights;
}

int64_t moe_cuda_workspace_bytes(const MoeCudaTensors& tensors, int64_t tokens_max, int64_t k) {
    // A smaller batch may use smaller tiles, and so more items.
    const int64_t items =
        (tokens_max * (k + 1) / 16 + tensors.experts + 1) * static_cast<int64_t>(sizeof(cuda::GemmItem));
    return cuda::make_layout(tensors, tokens_max, k).bytes + items;
}

void moe_cuda(cudaStream_t stream, const MoeCudaArgs& args) {
    const MoeCudaTensors& t = args.weights->tensors;
    check(args.tokens >= 1 && args.sm_count >= 1,
          "moe: needs tokens and the device's number of multiprocessors");
    const cuda::Layout layout = cuda::make_layout(t, args.tokens, args.k);
    auto* slots = reinterpret_cast<int32_t*>(args.workspace + layout.slots);
    const cuda::SortArgs sort_args{
        .chosen = args.chosen,
        .tokens = static_cast<int32_t>(args.tokens),
        .k = static_cast<int32_t>(args.k),
        .experts = static_cast<int32_t>(t.experts),
        .tile = layout.tile,
        .shared = t.shared_width > 0,
        .counts = reinterpret_cast<int32_t*>(args.workspace + layout.counts),
        .items = reinterpret_cast<cuda::GemmItem*>(args.workspace + layout.items),
        .row_source = reinterpret_cast<int32_t*>(args.workspace + layout.row_source),
        .slots = slots};
    cuda::sort_pairs<<<1, cuda::kSortThreads, 0, stream>>>(sort_args);
    cuda_check_launch();
    if (t.dtype == DType::kFloat8E4M3) {
        cuda::quantise_inputs(stream, args, layout);
        cuda::launch_gemms<true>(stream, args, layout);
    } else {
        cuda::launch_gemms<false>(stream, args, layout);
    }
    const cuda::CombineArgs combine_args{
        .out = reinterpret_cast<const __nv_bfloat16*>(args.workspace + layout.out),
        .slots = slots,
        .weights = args.expert_weights,
        .hidden = static_cast<int32_t>(t.hidden),
        .k = static_cast<int32_t>(args.k),
        .shared_row = t.shared_width > 0 ? static_cast<int32_t>(layout.routed_rows) : -1,
        .y = static_cast<__nv_bfloat16*>(args.y)};
    const int64_t blocks = (t.hidden / 8 + cuda::kCombineThreads - 1) / cuda::kCombineThreads;
    cuda::combine<<<dim3(static_cast<unsigned>(blocks), static_cast<unsigned>(args.tokens)),
                    cuda::kCombineThreads, 0, stream>>>(combine_args);
    cuda_check_launch();
}

}  // namespace tessera

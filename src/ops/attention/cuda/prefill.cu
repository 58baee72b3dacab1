// Prefill attention over paged K and V, with or without a cached prefix.
//
// Roofline: 4 * 128 operations for each (query, head, visible slot) at 0.8 PFLOP/s (fp8: 1.465): 8,192 causal
// queries with 64 heads take 1,375 us (751). The exponentials alone, 16 a clock and multiprocessor, take 520.
//
// Schedule: persistent blocks take query tiles in the plan's order. A tile is some queries times the heads of
// one KV head, 128 rows, so K and V are read once for the whole group. In the first warpgroup a warp enters
// the copies of q and of pages (two make a KV tile of 128 slots, the last tile first) into rings of 128-byte
// swizzled rows (prefill_bring.cuh). Two consumer warpgroups have 64 rows each (prefill_bf16.cuh,
// prefill_fp8.cuh); they issue the scores of the next KV tile and the product with V of the present one
// together, and take turns at the exponentials. e4m3: two blocks of a cluster have neighbouring tiles of
// queries, and each brings half of K and V for both.
#include <algorithm>
#include <type_traits>

#include "base/check.h"
#include "device/cuda/cuda_check.h"
#include "ops/attention/cuda/prefill_bf16.cuh"
#include "ops/attention/cuda/prefill_bring.cuh"
#include "ops/attention/cuda/prefill_fp8.cuh"
#include "ops/common/cuda/convert.cuh"
#include "ops/common/cuda/dependent_launch.cuh"
#include "ops/common/cuda/tensor_map.h"

namespace tessera::cuda::prefill {
namespace {

// Blocks: of a cluster. Two attend side by side and bring each half of K and V for both.
template <bool Fp8, bool Scaled, int Blocks>
__global__ void __launch_bounds__(Layout<Fp8>::kThreads, 1)
    prefill_kernel(const __grid_constant__ KernelArgs args) {
    extern __shared__ uint8_t shared_raw[];
    // What the lanes of a warp exchange is the same for all, as the compiler then knows.
    const uint32_t base = __shfl_sync(kFullWarp, (shared_address(shared_raw) + 1023) / 1024 * 1024, 0);
    const int group = __shfl_sync(kFullWarp, static_cast<int>(threadIdx.x) / kGroup, 0);
    if (threadIdx.x == 0) {
        init_barriers<Fp8, Scaled, Blocks>(base);
        prefetch_map(&args.q_map);
        prefetch_map(&args.k_map);
        prefetch_map(&args.v_map);
    }
    if (!Fp8) {
        write_sum_columns(base, static_cast<int>(threadIdx.x));
    } else if (threadIdx.x < 64) {
        write_sum_rows(base, static_cast<int>(threadIdx.x));
    }
    __syncthreads();
    if (Blocks == 2) {
        cluster_meet();
    }
    if (group == 0) {
        registers_give<Fp8 ? 56 : 40>();
        const int warp = static_cast<int>(threadIdx.x) / kWarp;
        if (warp == 0) {  // waits for the kernel before by itself
            Bringer<Fp8, Scaled, Blocks>{.args = args, .base = base}.run();
        } else if (Fp8 && warp <= kTurners) {
            turn_values<Blocks>(args, base, warp - 1);
        } else {
            wait_for_previous_kernel();
            let_next_kernel_start();
        }
    } else {
        registers_take<Fp8 ? 224 : 232>();
        wait_for_previous_kernel();
        const int thread = static_cast<int>(threadIdx.x) % kGroup;
        using Consumer = std::conditional_t<Fp8, Fp8Consumer<Scaled, Blocks>, Bf16Consumer>;
        attend_tiles(Consumer{{.args = args, .base = base, .index = group - 1, .thread = thread}});
    }
    if (Blocks == 2) {  // the other one may still arrive here
        __syncwarp();
        cluster_meet();
    }
}

CUtensorMap make_kv_map(const PagedKvCuda& kv, int64_t offset, int32_t kv_heads) {
    const int64_t row = kHeadDim * dtype_size(kv.dtype);
    // How many pages the pool has is not known here; every page in a table lies in it.
    const int64_t pages = std::min<int64_t>((int64_t{1} << 39) / kv.page_stride, INT32_MAX);
    return make_tensor_map(kv.pool + offset, {.dtype = kv.dtype,
                                              .rank = 4,
                                              .sizes = {kHeadDim, kPageSlots, kv_heads, pages},
                                              .strides = {row, kPageSlots * row, kv.page_stride},
                                              .box = {kPageSlots, 1, 1}});
}

template <bool Fp8, bool Scaled, int Blocks>
void launch_prefill(cudaStream_t stream, const KernelArgs& args) {
    cuda_check(cudaFuncSetAttribute(prefill_kernel<Fp8, Scaled, Blocks>,
                                    cudaFuncAttributeMaxDynamicSharedMemorySize, Layout<Fp8>::kBytes));
    const int64_t tiles = args.plan.items_max * args.prefill.plan.shape.kv_heads * args.plan.item_tiles;
    const auto blocks =
        static_cast<unsigned>(std::min<int64_t>(tiles, args.prefill.sm_count / Blocks * Blocks));
    cuda_check(launch_dependent({.grid = dim3(blocks),
                                 .threads = Layout<Fp8>::kThreads,
                                 .shared_bytes = Layout<Fp8>::kBytes,
                                 .stream = stream,
                                 .cluster = Blocks},
                                prefill_kernel<Fp8, Scaled, Blocks>, args));
}

}  // namespace
}  // namespace tessera::cuda::prefill

namespace tessera {

void attention_prefill_cuda(cudaStream_t stream, const PrefillCudaArgs& args) {
    const AttentionCudaShape& shape = args.plan.shape;
    const int32_t group = shape.q_heads / shape.kv_heads;
    check(group * shape.kv_heads == shape.q_heads && group >= 1 && group <= kAttentionCudaGroupMax,
          "attention prefill: a KV head must have 1 to 16 query heads");
    check(args.sm_count >= 1, "attention prefill: the number of multiprocessors is missing");
    const bool scaled = args.kv.k_scales_offset >= 0;
    cuda::prefill::KernelArgs kernel_args{
        .prefill = args,
        .plan = cuda::make_prefill_plan(args.plan),
        .group = group,
        .group_inverse = (65535u + static_cast<uint32_t>(group)) / static_cast<uint32_t>(group),
        .tile_queries = prefill_cuda_tile_queries(shape)};
    kernel_args.q_map = cuda::make_tensor_map(
        args.q, {.dtype = DType::kBFloat16,
                 .rank = 3,
                 .sizes = {cuda::prefill::kHeadDim, shape.q_heads, args.plan.rows_max},
                 .strides = {2 * cuda::prefill::kHeadDim, 2 * args.q_stride},
                 .box = {static_cast<uint32_t>(group), static_cast<uint32_t>(kernel_args.tile_queries)}});
    kernel_args.k_map = cuda::prefill::make_kv_map(args.kv, args.kv.k_offset, shape.kv_heads);
    kernel_args.v_map = cuda::prefill::make_kv_map(args.kv, args.kv.v_offset, shape.kv_heads);
    if (args.kv.dtype == DType::kFloat8E4M3) {
        // Blocks that share what they bring must see the same KV tiles.
        const bool pairs = kernel_args.plan.item_tiles == 2 && args.kv_tiles.counts == nullptr && !scaled &&
                           args.sm_count >= 2;
        const auto launch = scaled  ? cuda::prefill::launch_prefill<true, true, 1>
                            : pairs ? cuda::prefill::launch_prefill<true, false, 2>
                                    : cuda::prefill::launch_prefill<true, false, 1>;
        launch(stream, kernel_args);
    } else {
        check(args.kv.dtype == DType::kBFloat16 && !scaled && args.kv.v_scales == nullptr,
              "attention prefill: KV in bfloat16 without scales or in e4m3");
        cuda::prefill::launch_prefill<false, false, 1>(stream, kernel_args);
    }
}

}  // namespace tessera

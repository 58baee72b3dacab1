#include "base/check.h"
#include "device/cuda/cuda_check.h"
#include "ops/common/cuda/ask_ahead.cuh"
#include "ops/common/cuda/dependent_launch.cuh"
#include "ops/qkv_post/cuda/qkv_post_many.cuh"
#include "ops/qkv_post/cuda/qkv_post_units.cuh"

namespace tessera {
namespace cuda {
namespace {

// Roofline: reads q, k and v and writes as much: 3 to 4 bytes an element against about 20 operations, so
// bandwidth. Few tokens: as many blocks as possible share the latency of one. Lanes neighbouring lanes make
// one head; a block makes kPostThreads / Lanes heads of one token.
template <int Lanes, bool Options>
__global__ void __launch_bounds__(kPostThreads, Options ? 4 : 6)
    qkv_post_kernel(const __grid_constant__ PostArgs args) {
    constexpr int kHeadDim = 8 * Lanes;
    const int lane = static_cast<int>(threadIdx.x) % Lanes;
    const int q_heads = static_cast<int>(args.q_heads);
    const int kv_heads = static_cast<int>(args.kv_heads);
    const int head = static_cast<int>(blockIdx.y * kPostThreads + threadIdx.x) / Lanes;
    const int64_t index = blockIdx.x;
    const __nv_bfloat16* from =
        head < q_heads ? args.q + index * args.q_stride + head * kHeadDim
                       : (head < q_heads + kv_heads
                              ? args.k + index * args.kv_stride + (head - q_heads) * kHeadDim
                              : args.v + index * args.kv_stride + (head - q_heads - kv_heads) * kHeadDim);
    const bool exists = head < q_heads + 2 * kv_heads;
    if (exists && lane % 8 == 0) {
        ask_ahead(from + 8 * lane);
    }
    if (threadIdx.x == 1) {
        ask_ahead(args.positions + index);
        ask_ahead(args.sequences + index);
    }
    RawHead norm{};
    const __nv_bfloat16* weights = head < q_heads ? args.q_norm : args.k_norm;
    if (weights != nullptr) {
        norm = load_head<Lanes>(weights, lane);
    }
    wait_for_previous_kernel();
    let_next_kernel_start();
    const int32_t position = args.positions[index];
    const RawHead raw = exists ? load_head<Lanes>(from, lane) : RawHead{};
    if (position < 0) {
        return;
    }
    make_head<Lanes, Options>(args, find_token<Lanes>(args, index, position), head, norm, raw);
}

template <int Lanes, bool Options>
void launch_few(cudaStream_t stream, const PostArgs& args) {
    constexpr int kHeads = kPostThreads / Lanes;
    const dim3 grid(static_cast<unsigned>(args.tokens),
                    static_cast<unsigned>((args.q_heads + 2 * args.kv_heads + kHeads - 1) / kHeads));
    cuda_check(launch_dependent({grid, kPostThreads, 0, stream}, qkv_post_kernel<Lanes, Options>, args));
}

// Whether the kernels of many tokens can address it.
bool serves_many(const PostArgs& post) {
    uintptr_t places = 0;
    for (const void* place : {static_cast<const void*>(post.q), static_cast<const void*>(post.k),
                              static_cast<const void*>(post.v), static_cast<const void*>(post.q_out),
                              static_cast<const void*>(post.q8), static_cast<const void*>(post.pages),
                              static_cast<const void*>(post.q_norm), static_cast<const void*>(post.k_norm)}) {
        places |= reinterpret_cast<uintptr_t>(place);
    }
    const int64_t strides = post.q_stride | post.kv_stride | post.q_out_stride | post.q8_stride;
    return !post.batch_invariant && !post.norm_after_rope && places % 16 == 0 && strides % 8 == 0 &&
           post.q8_stride % 16 == 0 && (post.page_stride | post.k_offset | post.v_offset) % 16 == 0 &&
           (strides | post.page_stride) < int64_t{1} << 31;
}

template <int Lanes>
void launch(cudaStream_t stream, const PostArgs& args) {
    const bool scales = args.v_head_scale != nullptr || args.k_scale_offset >= 0 || args.q8 != nullptr;
    const bool options = scales || args.norm_after_rope || args.hadamard;
    const bool many = serves_many(args);
    if constexpr (Lanes == 16) {
        if (many && args.hadamard && launch_units<Lanes / 4, true>(stream, args)) {
            return;
        }
    }
    if (many && !args.hadamard &&
        (scales ? launch_units<Lanes / 4, false>(stream, args) : launch_many<Lanes / 2>(stream, args))) {
        return;
    }
    if (options) {
        launch_few<Lanes, true>(stream, args);
    } else {
        launch_few<Lanes, false>(stream, args);
    }
}

}  // namespace
}  // namespace cuda

void qkv_post_cuda(cudaStream_t stream, const QkvPostCudaArgs& args) {
    check(args.kv_dtype == DType::kBFloat16 || args.kv_dtype == DType::kFloat8E4M3,
          "qkv_post: kv_dtype must be bfloat16 or fp8_e4m3");
    check((args.q_stride | args.kv_stride | args.q_out_stride | args.q8_stride) % 4 == 0 &&
              (args.page_stride | args.k_offset | args.v_offset) % 8 == 0,
          "qkv_post: strides must be multiples of 4 elements, pages and their offsets of 8 bytes");
    check(args.head_dim == 64 || args.head_dim == 128 || args.head_dim == 256,
          "qkv_post: head_dim must be 64, 128 or 256");
    check(!args.hadamard || args.head_dim == 128, "qkv_post: the Hadamard matrix is that of head_dim 128");
    if (args.tokens == 0) {
        return;
    }
    const cuda::PostArgs post{args, 1 / args.k_scale, 1 / args.v_scale};
    if (args.head_dim == 64) {
        cuda::launch<8>(stream, post);
    } else if (args.head_dim == 128) {
        cuda::launch<16>(stream, post);
    } else {
        cuda::launch<32>(stream, post);
    }
}

}  // namespace tessera

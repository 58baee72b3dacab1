// The router on the device: float32 logits of bfloat16 activations, then the choice of
// ops/router_topk/router_topk.h, with the same bits for the same logits.
#pragma once

#include <cstdint>

#include <cuda_bf16.h>
#include <cuda_runtime_api.h>

#include "base/dtype.h"

namespace tessera {

// logits = x W^T with exact products and float32 sums. A row's sums do not depend on how many rows there are.
struct RouterLogitsCudaArgs {
    const __nv_bfloat16* x = nullptr;       // [tokens, width], 16-byte aligned
    int64_t x_stride = 0;                   // elements between rows, a multiple of 8
    const void* weight = nullptr;           // [experts, width], 16-byte aligned
    DType weight_dtype = DType::kBFloat16;  // kBFloat16 or kFloat32
    int64_t tokens = 0;
    int64_t experts = 0;
    int64_t width = 0;        // a multiple of 8
    float* logits = nullptr;  // [tokens, experts]
    int64_t logits_stride = 0;
};
void router_logits_cuda(cudaStream_t stream, const RouterLogitsCudaArgs& args);

inline constexpr int64_t kRouterCudaExpertsMax = 512;
inline constexpr int64_t kRouterCudaChosenMax = 32;

struct RouterTopkCudaArgs {
    const float* logits = nullptr;  // [tokens, experts]
    int64_t logits_stride = 0;
    const float* bias = nullptr;  // [experts]; may be null
    // [tokens]; < 0 is padding, which chooses -1 with weight 0. Null: there is none.
    const int32_t* positions = nullptr;
    int64_t tokens = 0;
    int64_t experts = 0;  // at most kRouterCudaExpertsMax
    int64_t k = 0;        // 1 .. min(experts, kRouterCudaChosenMax)
    bool normalise = true;
    float scale = 1.0f;
    int32_t* chosen = nullptr;  // [tokens, k], ascending
    float* weights = nullptr;   // [tokens, k]
};
// A token with NaN logits gets valid experts and NaN weights.
void router_topk_cuda(cudaStream_t stream, const RouterTopkCudaArgs& args);

}  // namespace tessera

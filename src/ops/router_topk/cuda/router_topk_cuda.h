// The router on the device: float32-exact logits of bfloat16 activations, then the choice of
// ops/router_topk/router_topk.h, with the same bits for the same logits.
//
// A float32 or float16 weight is the sum of two bfloat16, high and low, to 17 bits; products with bfloat16
// activations are then exact in the tensor cores, and every few hundred of them are added up in float32.
// Where the checkpoint's weights are bfloat16, low is zero and left out.
#pragma once

#include <cstddef>
#include <cstdint>

#include <cuda_bf16.h>
#include <cuda_runtime_api.h>

namespace tessera {

struct RouterLogitsCudaArgs {
    const __nv_bfloat16* x = nullptr;     // [tokens, width], 16-byte aligned
    int64_t x_stride = 0;                 // elements between rows, a multiple of 8
    const __nv_bfloat16* high = nullptr;  // [experts, width], 16-byte aligned: the weights
    const __nv_bfloat16* low = nullptr;  // [experts, width]: what the weights have beyond `high`; may be null
    int64_t tokens = 0;
    int64_t experts = 0;
    int64_t width = 0;        // a multiple of 8
    float* logits = nullptr;  // [tokens, experts], 8-byte aligned
    int64_t logits_stride = 0;
    // router_cuda_workspace_bytes(), used by one stream at a time. All its bytes are 0xFF before the first
    // use, and again after each. Null: any number of tokens goes the way of many, with two kernels.
    std::byte* workspace = nullptr;
    // A token's bits do not depend on how many tokens there are.
    bool deterministic = false;
    int sm_count = 0;  // of the device
};
void router_logits_cuda(cudaStream_t stream, const RouterLogitsCudaArgs& args);

int64_t router_cuda_workspace_bytes(int64_t experts, int64_t width);

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

// Both. `choice` is of the same tokens and experts, and its logits are those of `product`, whatever it says.
// product.logits may be left as they were: where one kernel does both it does not write them.
void router_cuda(cudaStream_t stream, const RouterLogitsCudaArgs& product, RouterTopkCudaArgs choice);

}  // namespace tessera

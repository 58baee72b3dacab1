#include "ops/cuda/cuda_registry.h"

#include "ops/attention/cuda/attention_cuda_cases.h"
#include "ops/embed/cuda/embed_cuda_cases.h"
#include "ops/linear/cuda/linear_cuda_cases.h"
#include "ops/moe/cuda/moe_cuda_cases.h"
#include "ops/moe/cuda/moe_grouped_cuda_cases.h"
#include "ops/qkv_post/cuda/qkv_post_cuda_cases.h"
#include "ops/rms_norm/cuda/rms_norm_cuda_cases.h"
#include "ops/router_topk/cuda/router_topk_cuda_cases.h"
#include "ops/sample/cuda/sample_cuda_cases.h"
#include "ops/swiglu/cuda/swiglu_cuda_cases.h"

namespace tessera {
namespace {

constexpr CudaOpEntry kOperators[] = {
    {"embed", "rows of the embedding table", "same bits", embed_cuda_cases},
    {"rms_norm", "norm of rows, with residual add and e4m3", "within two roundings", rms_norm_cuda_cases},
    {"linear", "y = x W^T: own kernel to 64 rows, cuBLASLt", "one rounding, += two", linear_cuda_cases},
    {"quantize", "rows to e4m3", "same bits", quantize_cuda_cases},
    {"qkv_post", "head norm, RoPE, K and V into their pages", "within three roundings", qkv_post_cuda_cases},
    {"attention_plan", "work list of a decode step", "through attention", attention_plan_cuda_cases},
    {"attention_decode", "one to four queries a sequence over pages", "rms 5e-3",
     attention_decode_cuda_cases},
    {"attention_prefill", "many queries a sequence over pages", "rms 5e-3; fp8 4.5e-2",
     attention_prefill_cuda_cases},
    {"router", "logits and choice of the experts", "sets where 1e-6 apart", router_cuda_cases},
    {"router_logits", "float32-exact logits of the experts", "4e-6; two parts 2e-5",
     router_logits_cuda_cases},
    {"router_topk", "sigmoid scores, biased choice, weights", "same bits", router_topk_cuda_cases},
    {"moe", "routed and shared SwiGLU experts, dense layers", "rms 5e-3, fp8 2.5e-2", moe_cuda_cases},
    {"moe_w4", "routed experts with int4 weights", "rms 2.5e-2", moe_w4_cuda_cases},
    {"moe_w8", "routed experts with e4m3 weights in blocks of 128 x 128", "rms 2.5e-2", moe_w8_cuda_cases},
    {"swiglu", "silu(gate) * up", "same bits", swiglu_cuda_cases},
    {"sample", "logits to tokens and log-probabilities", "same tokens", sample_cuda_cases},
};

}  // namespace

std::span<const CudaOpEntry> cuda_op_registry() {
    return kOperators;
}

}  // namespace tessera

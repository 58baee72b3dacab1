#include "ops/registry.h"

#include "ops/attention/attention_cases.h"
#include "ops/embed/embed_cases.h"
#include "ops/linear/linear_cases.h"
#include "ops/moe/moe_cases.h"
#include "ops/qkv_post/qkv_post_cases.h"
#include "ops/rms_norm/rms_norm_cases.h"
#include "ops/router_topk/router_topk_cases.h"
#include "ops/sample/sample_cases.h"

namespace tessera {
namespace {

constexpr OpEntry kOperators[] = {
    {"embed", "rows of the embedding table as float32", "same bits", embed_cases},
    {"rms_norm", "root-mean-square norm of rows", "same bits", rms_norm_cases},
    {"linear", "y = x W^T over packed weights", "same bits", linear_cases},
    {"qkv_post", "head norm, RoPE, K and V into their pages", "same bits", qkv_post_cases},
    {"attention", "causal grouped-query attention over pages", "same bits", attention_cases},
    {"router_topk", "sigmoid scores, biased choice, weights", "same bits", router_topk_cases},
    {"moe", "routed and shared SwiGLU experts", "same bits", moe_cases},
    {"swiglu", "a dense SwiGLU layer, as moe computes it", "same bits", swiglu_cases},
    {"sample", "logits to tokens and log-probabilities", "same tokens", sample_cases},
};

}  // namespace

std::span<const OpEntry> op_registry() {
    return kOperators;
}

}  // namespace tessera

#include "ops/cuda/cuda_registry.h"

#include "ops/embed/cuda/embed_cuda_cases.h"
#include "ops/qkv_post/cuda/qkv_post_cuda_cases.h"
#include "ops/rms_norm/cuda/rms_norm_cuda_cases.h"
#include "ops/router_topk/cuda/router_topk_cuda_cases.h"
#include "ops/sample/cuda/sample_cuda_cases.h"
#include "ops/swiglu/cuda/swiglu_cuda_cases.h"

namespace tessera {
namespace {

constexpr CudaOpEntry kOperators[] = {
    {"embed", "same bits", embed_cuda_cases},
    {"rms_norm", "within two roundings", rms_norm_cuda_cases},
    {"qkv_post", "within three roundings", qkv_post_cuda_cases},
    {"router_logits", "float32 sums", router_logits_cuda_cases},
    {"router_topk", "same bits", router_topk_cuda_cases},
    {"swiglu", "same bits", swiglu_cuda_cases},
    {"sample", "same tokens", sample_cuda_cases},
};

}  // namespace

std::span<const CudaOpEntry> cuda_op_registry() {
    return kOperators;
}

}  // namespace tessera

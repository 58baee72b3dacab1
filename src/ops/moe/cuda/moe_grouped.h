// The mixture with grouped routed experts: which kernels serve a call, and a shared expert beside them.
#pragma once

#include <cstddef>

#include <cuda_runtime_api.h>

#include "ops/moe/cuda/moe_cuda.h"

namespace tessera::cuda {

// As moe_cuda(). exchange: 2 * few_exchange_bytes(), of few_experts_cuda() and of few_experts_w4_cuda().
void moe_grouped(cudaStream_t stream, const MoeCudaArgs& args, std::byte* exchange);

}  // namespace tessera::cuda

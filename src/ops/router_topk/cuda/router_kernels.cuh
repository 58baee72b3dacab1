// The kernels that router_logits_cuda() and router_cuda() choose from.
#pragma once

#include "ops/router_topk/cuda/router_topk_cuda.h"

namespace tessera::cuda {

void check_router_choice(const RouterTopkCudaArgs& args);

// At most kRouterFewTokens, logits or choice, whichever has a place to go to.
inline constexpr int64_t kRouterFewTokens = 64;
bool router_few_serves(const RouterLogitsCudaArgs& args);
void launch_router_few(cudaStream_t stream, const RouterLogitsCudaArgs& product,
                       const RouterTopkCudaArgs& choice);

// Up to 4,096 tokens of at most 192 experts, a width that is a multiple of 64 from 512 on: logits or choice,
// whichever has a place to go to. The bits are those of router_many with `deterministic`, for any number of
// tokens.
bool router_middle_serves(const RouterLogitsCudaArgs& args);
void launch_router_middle(cudaStream_t stream, const RouterLogitsCudaArgs& product,
                          const RouterTopkCudaArgs& choice);
int64_t router_middle_workspace_bytes(int64_t experts, int64_t width);  // 0: not served

// Any number of tokens; a token's bits do not depend on it.
bool router_many_serves(const RouterLogitsCudaArgs& args);
void launch_router_many(cudaStream_t stream, const RouterLogitsCudaArgs& args);

}  // namespace tessera::cuda

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

// Up to 4,096 tokens (with `deterministic` 2,048) of at most 192 experts, a width that is a multiple of 64
// from 512 on, on 128 multiprocessors or more, with a workspace: logits or choice, whichever has a place to
// go to. Up to 2,048 tokens the bits are those of router_many with `deterministic`.
bool router_middle_serves(const RouterLogitsCudaArgs& args);
void launch_router_middle(cudaStream_t stream, const RouterLogitsCudaArgs& product,
                          const RouterTopkCudaArgs& choice);
// 0: not served.
int64_t router_middle_workspace_bytes(int64_t experts, int64_t width);

// Any number of tokens; a token's bits do not depend on it.
bool router_many_serves(const RouterLogitsCudaArgs& args);
void launch_router_many(cudaStream_t stream, const RouterLogitsCudaArgs& args);

}  // namespace tessera::cuda

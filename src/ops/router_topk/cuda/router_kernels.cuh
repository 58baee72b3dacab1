// The kernels that router_logits_cuda() and router_cuda() choose from.
#pragma once

#include "ops/router_topk/cuda/router_topk_cuda.h"

namespace tessera::cuda {

void check_router_choice(const RouterTopkCudaArgs& args);

// At most kRouterFewTokens, beyond 24 only where router_middle does not serve: logits or choice, whichever
// has a place to go to.
inline constexpr int64_t kRouterFewTokens = 64;
bool router_few_serves(const RouterLogitsCudaArgs& args);
void launch_router_few(cudaStream_t stream, const RouterLogitsCudaArgs& product,
                       const RouterTopkCudaArgs& choice);

// At most kRouterMiddleTokens of at most 192 experts, a width that is a multiple of 64 from 512 on, on 128
// multiprocessors or more, with a workspace: logits or choice, whichever has a place to go to. The bits are
// those of router_many with `deterministic`.
inline constexpr int64_t kRouterMiddleTokens = 2048;
bool router_middle_serves(const RouterLogitsCudaArgs& args);
void launch_router_middle(cudaStream_t stream, const RouterLogitsCudaArgs& product,
                          const RouterTopkCudaArgs& choice);
// 0: not served.
int64_t router_middle_workspace_bytes(int64_t experts, int64_t width);

// At most kRouterPairsTokens, experts and width as router_middle's, not with `deterministic`: logits or
// choice, whichever has a place to go to.
inline constexpr int64_t kRouterPairsTokens = 4096;
bool router_pairs_serves(const RouterLogitsCudaArgs& args);
void launch_router_pairs(cudaStream_t stream, const RouterLogitsCudaArgs& product,
                         const RouterTopkCudaArgs& choice);

// Any number of tokens; a token's bits do not depend on it.
bool router_many_serves(const RouterLogitsCudaArgs& args);
void launch_router_many(cudaStream_t stream, const RouterLogitsCudaArgs& args);

}  // namespace tessera::cuda

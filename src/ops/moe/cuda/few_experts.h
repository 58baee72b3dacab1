// The mixture of experts for a few tokens: one kernel without a sorted list.
#pragma once

#include <cuda_runtime_api.h>

#include "ops/moe/cuda/moe_cuda.h"

namespace tessera {

// Where the blocks hand act to each other; all bytes are 0xFF before the first call of all.
// few_experts_cuda() has one, few_experts_w4_cuda() and few_one_w4_cuda() another: they differ in arrivals.
int64_t few_exchange_bytes();

// What few_experts_cuda() reads beside MoeCudaArgs, and its workspace.
struct FewExpertsInputs {
    const void* x = nullptr;         // [tokens, hidden] in the weights' format, as the routed experts read it
    const void* shared_x = nullptr;  // the same for the shared expert
    std::byte* exchange = nullptr;   // few_exchange_bytes(), 16-byte aligned
    bool add = true;                 // to y
};

// Whether it takes the call: at most 8 tokens and 64 pairs, and no bits that must not depend on the batch.
bool few_experts_serves(const MoeCudaArgs& args);
// As moe_cuda(), but for the order of the sums.
void few_experts_cuda(cudaStream_t stream, const MoeCudaArgs& args, const FewExpertsInputs& inputs);

// One token and narrow experts in fp8, whose weights fit into the multiprocessors' shared memory:
// few_experts_cuda() does that.
bool few_one_serves(const MoeCudaArgs& args);
void few_one_cuda(cudaStream_t stream, const MoeCudaArgs& args, const FewExpertsInputs& inputs);

// The same for routed experts of int4.
struct FewExpertsW4Inputs {
    std::byte* exchange = nullptr;
    const void* more = nullptr;  // [tokens, hidden] bfloat16: the shared expert's outputs; may be null
};
bool few_experts_w4_serves(const MoeCudaArgs& args);
void few_experts_w4_cuda(cudaStream_t stream, const MoeCudaArgs& args, const FewExpertsW4Inputs& inputs);

// The same for one token.
bool few_one_w4_serves(const MoeCudaArgs& args);
void few_one_w4_cuda(cudaStream_t stream, const MoeCudaArgs& args, const FewExpertsW4Inputs& inputs);

}  // namespace tessera

// The mixture of experts for a few tokens: two kernels without a sorted list.
#pragma once

#include <cuda_runtime_api.h>

#include "ops/moe/cuda/moe_cuda.h"

namespace tessera {

// What few_experts_cuda() reads beside MoeCudaArgs, and its workspace.
struct FewExpertsInputs {
    const void* x = nullptr;         // [tokens, hidden] in the weights' format, as the routed experts read it
    const void* shared_x = nullptr;  // the same for the shared expert
    void* act = nullptr;             // [tokens * (k + 1), act_width] in the weights' format
    int64_t act_width = 0;           // elements, a multiple of 16
    bool add = true;                 // to y
};

// Whether it takes the call: at most 8 tokens and 64 pairs, and no bits that must not depend on the batch.
bool few_experts_serves(const MoeCudaArgs& args);
// As moe_cuda(), but for the order of the sums.
void few_experts_cuda(cudaStream_t stream, const MoeCudaArgs& args, const FewExpertsInputs& inputs);

// The same for routed experts of int4, whose workspace `act` is [tokens * k, width] bfloat16.
struct FewExpertsW4Inputs {
    void* act = nullptr;
    const void* more = nullptr;  // [tokens, hidden] bfloat16: the shared expert's outputs; may be null
};
bool few_experts_w4_serves(const MoeCudaArgs& args);
void few_experts_w4_cuda(cudaStream_t stream, const MoeCudaArgs& args, const FewExpertsW4Inputs& inputs);

}  // namespace tessera

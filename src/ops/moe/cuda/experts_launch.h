// How the experts' kernel of bfloat16 and e4m3 weights is started: its inputs, its arguments, its tiles.
#pragma once

#include <cuda_runtime_api.h>

#include "ops/moe/cuda/combine.h"
#include "ops/moe/cuda/moe_layout.h"
#include "ops/moe/cuda/narrow.h"
#include "ops/moe/cuda/plan.h"

namespace tessera::cuda {

// What the experts read: x itself, or x in e4m3.
struct ExpertInputs {
    const uint8_t* routed = nullptr;
    const uint8_t* shared = nullptr;
};
ExpertInputs expert_inputs(const MoeCudaArgs& args, const MoeLayout& layout);

// x in e4m3 where the caller has not given it, and for a shared expert with a scale of its own.
void quantise_inputs(cudaStream_t stream, const MoeCudaArgs& args, const MoeLayout& layout);

PlanArgs plan_args(const MoeCudaArgs& args, const MoeLayout& layout);

// Whether rows of down come in boxes of 128 in which a warp's two times 16 are neighbours.
bool down_pairs(const MoeCudaTensors& t);

// own: null where no block makes the plan for itself.
ExpertsArgs experts_args(const MoeCudaArgs& args, const MoeLayout& layout, const PlanArgs& plan,
                         OwnCounters* own);

void launch_experts(cudaStream_t stream, const ExpertsArgs& args, const MoeLayout& layout, bool fp8,
                    int blocks);

// What the kernels of narrow experts ask. shared_tokens: see NarrowChoices.
NarrowSizes narrow_sizes(const MoeCudaArgs& args);
NarrowChoices narrow_choices(const MoeCudaArgs& args, int64_t shared_tokens);

// shared_row: of token 0 in out; -1 without a shared expert.
CombineArgs combine_args(const MoeCudaArgs& args, const MoeLayout& layout, const PlanArgs& plan,
                         int32_t shared_row);
// The same where a pair's row of out is its own number.
CombineArgs combine_own_args(const MoeCudaArgs& args, const MoeLayout& layout, int32_t shared_row);

}  // namespace tessera::cuda

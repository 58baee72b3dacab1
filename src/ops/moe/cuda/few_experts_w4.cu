#include <algorithm>

#include "base/check.h"
#include "device/cuda/cuda_check.h"
#include "ops/moe/cuda/few_experts.h"
#include "ops/moe/cuda/few_experts_w4.cuh"

namespace tessera {
namespace {

using namespace cuda;

constexpr int kSharedMax = 216 << 10;

int gate_up_bytes(const MoeCudaArgs& args) {
    return few_w4_gate_up_shared(static_cast<int>(args.weights->tensors.hidden));
}
int down_bytes(const MoeCudaArgs& args) {
    return few_w4_down_shared(static_cast<int>(args.tokens * args.k),
                              static_cast<int>(args.weights->tensors.width));
}

}  // namespace

bool few_experts_w4_serves(const MoeCudaArgs& args) {
    return !args.batch_invariant && args.tokens <= kFewTokens && args.tokens * args.k <= kFewPairs &&
           gate_up_bytes(args) + 18 * 1024 <= kSharedMax && down_bytes(args) <= kSharedMax;
}

void few_experts_w4_cuda(cudaStream_t stream, const MoeCudaArgs& args, const FewExpertsW4Inputs& inputs) {
    check(few_experts_w4_serves(args), "moe: not a call of few tokens");
    const MoeCudaTensors& t = args.weights->tensors;
    const FewW4Args kernel_args{.routing = {.chosen = args.chosen,
                                            .tokens = static_cast<int32_t>(args.tokens),
                                            .k = static_cast<int32_t>(args.k),
                                            .experts = static_cast<int32_t>(t.experts)},
                                .gate_up = static_cast<const uint8_t*>(t.gate_up),
                                .down = static_cast<const uint8_t*>(t.down),
                                .x = static_cast<const uint16_t*>(args.x),
                                .hidden = static_cast<int32_t>(t.hidden),
                                .width = static_cast<int32_t>(t.width),
                                .expert_weights = args.expert_weights,
                                .act = static_cast<uint16_t*>(inputs.act),
                                .more = static_cast<const __nv_bfloat16*>(inputs.more),
                                .y = static_cast<__nv_bfloat16*>(args.y)};
    const int64_t units = args.tokens * args.k * t.width / kFewW4GateOutputs;
    cuda_check(cudaFuncSetAttribute(few_w4_gate_up_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                    gate_up_bytes(args)));
    cuda_check(launch_dependent({.grid = dim3(static_cast<unsigned>(std::min<int64_t>(units, args.sm_count))),
                                 .threads = kFewW4Threads,
                                 .shared_bytes = gate_up_bytes(args),
                                 .stream = stream},
                                few_w4_gate_up_kernel, kernel_args));
    cuda_check(cudaFuncSetAttribute(few_w4_down_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                    down_bytes(args)));
    cuda_check(launch_dependent({.grid = dim3(static_cast<unsigned>(t.hidden / kFewW4DownOutputs)),
                                 .threads = kFewW4Threads,
                                 .shared_bytes = down_bytes(args),
                                 .stream = stream},
                                few_w4_down_kernel, kernel_args));
}

}  // namespace tessera

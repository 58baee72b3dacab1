#include "base/check.h"
#include "device/cuda/cuda_check.h"
#include "ops/moe/cuda/few_experts.h"
#include "ops/moe/cuda/few_experts_w4.cuh"

namespace tessera {
namespace {

using namespace cuda;

constexpr int kSharedMax = 206 << 10;

int shared_bytes(const MoeCudaArgs& args, int stages) {
    const MoeCudaTensors& t = args.weights->tensors;
    return few_w4_shared_bytes(stages, static_cast<int>(args.tokens * args.k), static_cast<int>(t.hidden),
                               static_cast<int>(t.width));
}

template <int Stages>
void launch(cudaStream_t stream, const MoeCudaArgs& args, const FewW4Args& kernel_args) {
    const auto kernel = few_w4_kernel<Stages>;
    const int bytes = shared_bytes(args, Stages);
    cuda_check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes));
    int resident = 0;
    cuda_check(cudaOccupancyMaxActiveBlocksPerMultiprocessor(&resident, kernel, kFewW4Threads,
                                                             static_cast<size_t>(bytes)));
    check(resident >= 1, "moe: blocks that wait for others must be resident");
    cuda_check(launch_dependent({.grid = dim3(static_cast<unsigned>(args.sm_count)),
                                 .threads = kFewW4Threads,
                                 .shared_bytes = bytes,
                                 .stream = stream},
                                kernel, kernel_args));
}

}  // namespace

bool few_experts_w4_serves(const MoeCudaArgs& args) {
    return !args.batch_invariant && args.tokens <= kFewTokens && args.tokens * args.k <= kFewPairs &&
           args.tokens * args.k * args.weights->tensors.width * 2 <= kFewActBytes &&
           shared_bytes(args, kFewW4Stages) <= kSharedMax;
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
                                .exchange = reinterpret_cast<FewExchange*>(inputs.exchange),
                                .more = static_cast<const __nv_bfloat16*>(inputs.more),
                                .y = static_cast<__nv_bfloat16*>(args.y)};
    if (shared_bytes(args, 2 * kFewW4Stages) <= kSharedMax) {
        launch<2 * kFewW4Stages>(stream, args, kernel_args);
    } else {
        launch<kFewW4Stages>(stream, args, kernel_args);
    }
}

}  // namespace tessera

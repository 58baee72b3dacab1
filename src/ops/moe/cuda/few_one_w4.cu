#include "base/check.h"
#include "device/cuda/cuda_check.h"
#include "ops/moe/cuda/few_experts.h"
#include "ops/moe/cuda/few_one_w4.cuh"

namespace tessera {
namespace {

using namespace cuda;

static_assert(kOneW4Copies * kOneW4K * kOneW4WidthMax * 2 <= kFewActBytes);

}  // namespace

bool few_one_w4_serves(const MoeCudaArgs& args) {
    const MoeCudaTensors& t = args.weights->tensors;
    return !args.batch_invariant && args.tokens == 1 && t.width <= kOneW4WidthMax && args.k <= kOneW4K &&
           t.hidden <= kOneW4HiddenMax && t.hidden <= args.sm_count * kOneW4DownOutputs;
}

void few_one_w4_cuda(cudaStream_t stream, const MoeCudaArgs& args, const FewExpertsW4Inputs& inputs) {
    check(few_one_w4_serves(args), "moe: not a call of one token");
    const MoeCudaTensors& t = args.weights->tensors;
    const auto items = static_cast<int>(t.width / kOneW4Outputs);  // of an expert
    const int round = args.sm_count * kOneW4Depth;
    const FewOneW4Args kernel_args{.chosen = args.chosen,
                                   .x = static_cast<const uint16_t*>(args.x),
                                   .gate_up = static_cast<const uint8_t*>(t.gate_up),
                                   .down = static_cast<const uint8_t*>(t.down),
                                   .exchange = reinterpret_cast<FewExchange*>(inputs.exchange),
                                   .k = static_cast<int32_t>(args.k),
                                   .experts = static_cast<int32_t>(t.experts),
                                   .hidden = static_cast<int32_t>(t.hidden),
                                   .width = static_cast<int32_t>(t.width),
                                   .rounds = (static_cast<int>(args.k) * items + round - 1) / round,
                                   .inverse = static_cast<uint32_t>(((1 << kOneW4Shift) + items - 1) / items),
                                   .expert_weights = args.expert_weights,
                                   .more = static_cast<const uint16_t*>(inputs.more),
                                   .y = static_cast<uint16_t*>(args.y)};
    cuda_check(launch_dependent({.grid = dim3(static_cast<unsigned>(args.sm_count)),
                                 .threads = kOneW4Threads,
                                 .shared_bytes = static_cast<int>(args.k * t.width * 2),
                                 .stream = stream},
                                few_one_w4_kernel, kernel_args));
}

}  // namespace tessera

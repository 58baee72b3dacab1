#include <algorithm>

#include "base/check.h"
#include "device/cuda/cuda_check.h"
#include "ops/moe/cuda/few_experts.cuh"
#include "ops/moe/cuda/few_experts.h"

namespace tessera {
namespace {

using namespace cuda;

constexpr int64_t kPartsBytesMax = 96 << 10;  // two blocks a multiprocessor

int64_t slices_of(const MoeCudaTensors& t) {
    const int64_t bytes = std::max(t.width, t.shared_width) * dtype_size(t.dtype);
    return (bytes + kFewSlice - 1) / kFewSlice;
}

int64_t parts_bytes(const MoeCudaArgs& args) {
    return args.tokens * (args.k + 1) * slices_of(args.weights->tensors) * kFewDownOutputs * 4;
}

FewRouting few_routing(const MoeCudaArgs& args, bool shared) {
    return {.chosen = args.chosen,
            .tokens = static_cast<int32_t>(args.tokens),
            .k = static_cast<int32_t>(args.k),
            .experts = static_cast<int32_t>(args.weights->tensors.experts),
            .shared = shared};
}

FewArgs few_args(const MoeCudaArgs& args, const FewExpertsInputs& inputs) {
    const MoeCudaTensors& t = args.weights->tensors;
    FewArgs out{.routing = few_routing(args, t.shared_width > 0),
                .hidden = static_cast<int32_t>(t.hidden),
                .expert_weights = args.expert_weights,
                .act = static_cast<uint8_t*>(inputs.act),
                .act_bytes = inputs.act_width * dtype_size(t.dtype),
                .y = static_cast<__nv_bfloat16*>(args.y),
                .add = inputs.add};
    out.routed = {.gate_up = static_cast<const uint8_t*>(t.gate_up),
                  .down = static_cast<const uint8_t*>(t.down),
                  .x = static_cast<const uint8_t*>(inputs.x),
                  .width = static_cast<int32_t>(t.width),
                  .input_scale = t.input_scale,
                  .gate_up_scale = t.gate_up_scale,
                  .down_scale = t.down_scale,
                  .down_input_scale = t.down_input_scale};
    out.shared = {.gate_up = static_cast<const uint8_t*>(t.shared_gate_up),
                  .down = static_cast<const uint8_t*>(t.shared_down),
                  .x = static_cast<const uint8_t*>(inputs.shared_x),
                  .width = static_cast<int32_t>(t.shared_width),
                  .input_scale = t.shared_input_scale,
                  .gate_up_scale = t.shared_gate_up_scale,
                  .down_scale = t.shared_down_scale,
                  .down_input_scale = t.shared_down_input_scale};
    return out;
}

template <bool Fp8>
void launch(cudaStream_t stream, const MoeCudaArgs& args, const FewExpertsInputs& inputs) {
    const MoeCudaTensors& t = args.weights->tensors;
    const FewArgs kernel_args = few_args(args, inputs);
    const int64_t units = (t.shared_width + args.tokens * args.k * t.width) / kFewGateOutputs;
    const int64_t blocks = std::min<int64_t>(units, 2 * args.sm_count);
    cuda_check(launch_dependent(
        {.grid = dim3(static_cast<unsigned>(blocks)), .threads = 32 * kFewWarps, .stream = stream},
        few_gate_up_kernel<Fp8>, kernel_args));
    const int parts = static_cast<int>(parts_bytes(args));
    cuda_check(
        cudaFuncSetAttribute(few_down_kernel<Fp8>, cudaFuncAttributeMaxDynamicSharedMemorySize, parts));
    cuda_check(launch_dependent({.grid = dim3(static_cast<unsigned>(t.hidden / kFewDownOutputs)),
                                 .threads = 32 * kFewWarps,
                                 .shared_bytes = parts,
                                 .stream = stream},
                                few_down_kernel<Fp8>, kernel_args, static_cast<int>(slices_of(t))));
}

}  // namespace

bool few_experts_serves(const MoeCudaArgs& args) {
    return !args.batch_invariant && args.tokens <= kFewTokens && args.tokens * args.k <= kFewPairs &&
           parts_bytes(args) <= kPartsBytesMax;
}

void few_experts_cuda(cudaStream_t stream, const MoeCudaArgs& args, const FewExpertsInputs& inputs) {
    check(few_experts_serves(args), "moe: not a call of few tokens");
    if (args.weights->tensors.dtype == DType::kFloat8E4M3) {
        launch<true>(stream, args, inputs);
    } else {
        launch<false>(stream, args, inputs);
    }
}

}  // namespace tessera

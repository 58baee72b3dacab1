#include <algorithm>

#include "base/check.h"
#include "device/cuda/cuda_check.h"
#include "ops/moe/cuda/few_experts.h"
#include "ops/moe/cuda/few_one.cuh"

namespace tessera {
namespace {

using namespace cuda;

constexpr int kSharedMax = (227 << 10) - static_cast<int>(sizeof(FewOneShared)) - 128;  // of a block
// Pieces under way: with more, those of down take their share of memory from other blocks' gate and up.
constexpr int kAhead = 4;

// Of a block, at most.
int64_t units_of(const MoeCudaArgs& args) {
    const MoeCudaTensors& t = args.weights->tensors;
    return (args.k * t.width + t.shared_width + args.sm_count - 1) / args.sm_count;
}
int64_t weights_bytes(const MoeCudaArgs& args) {
    const MoeCudaTensors& t = args.weights->tensors;
    return kOneOutputs * (t.shared_width + args.k * t.width) + units_of(args) * 2 * t.hidden;
}

}  // namespace

bool few_one_serves(const MoeCudaArgs& args) {
    const MoeCudaTensors& t = args.weights->tensors;
    const int64_t units = units_of(args);
    return t.dtype == DType::kFloat8E4M3 && t.experts > 0 && args.tokens == 1 && args.k < kOneEntries &&
           t.hidden <= kOneHiddenMax && t.hidden % kOneOutputs == 0 &&
           t.hidden / kOneOutputs <= args.sm_count &&
           std::max(t.width, t.shared_width) <= kOneSlices * kOneSlice && units <= kOneUnits &&
           units + args.k < kOnePieces && weights_bytes(args) <= kSharedMax;
}

void few_one_cuda(cudaStream_t stream, const MoeCudaArgs& args, const FewExpertsInputs& inputs) {
    check(few_one_serves(args), "moe: not a call of one token");
    const MoeCudaTensors& t = args.weights->tensors;
    const FewOneArgs one{.shared_gate_up = static_cast<const uint8_t*>(t.shared_gate_up),
                         .shared_down = static_cast<const uint8_t*>(t.shared_down),
                         .chosen = args.chosen,
                         .x = static_cast<const uint8_t*>(inputs.x),
                         .shared_x = static_cast<const uint8_t*>(inputs.shared_x),
                         .hidden = static_cast<uint16_t>(t.hidden),
                         .width = static_cast<uint16_t>(t.width),
                         .shared_width = static_cast<uint16_t>(t.shared_width),
                         .down_blocks = static_cast<uint16_t>(t.hidden / kOneOutputs),
                         .k = static_cast<uint8_t>(args.k),
                         .ahead = kAhead,
                         .add = inputs.add,
                         .experts = static_cast<uint16_t>(t.experts),
                         .act_bytes = static_cast<uint16_t>(std::max(t.width, t.shared_width)),
                         .gate_up = static_cast<const uint8_t*>(t.gate_up),
                         .down = static_cast<const uint8_t*>(t.down),
                         .exchange = reinterpret_cast<FewExchange*>(inputs.exchange),
                         .expert_weights = args.expert_weights,
                         .input_scale = t.input_scale,
                         .shared_input_scale = t.shared_input_scale,
                         .gate_up_scale = t.gate_up_scale,
                         .down_scale = t.down_scale,
                         .down_input_scale = t.down_input_scale,
                         .shared_gate_up_scale = t.shared_gate_up_scale,
                         .shared_down_scale = t.shared_down_scale,
                         .shared_down_input_scale = t.shared_down_input_scale,
                         .y = static_cast<__nv_bfloat16*>(args.y)};
    const auto bytes = static_cast<int>(weights_bytes(args));
    cuda_check(cudaFuncSetAttribute(few_one_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedMax));
    cuda_check(launch_dependent({.grid = dim3(static_cast<unsigned>(args.sm_count)),
                                 .threads = kOneThreads,
                                 .shared_bytes = bytes,
                                 .stream = stream},
                                few_one_kernel, one));
}

}  // namespace tessera

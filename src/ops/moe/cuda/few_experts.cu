#include <algorithm>
#include <atomic>

#include "base/check.h"
#include "device/cuda/cuda_check.h"
#include "ops/moe/cuda/few_experts.cuh"
#include "ops/moe/cuda/few_experts.h"

namespace tessera {
namespace {

using namespace cuda;

constexpr int kBlocks = 2;             // a multiprocessor
constexpr int kSharedMax = 100 << 10;  // of a block

int64_t row_bytes(const MoeCudaTensors& t) {
    return std::max(t.width, t.shared_width) * dtype_size(t.dtype);
}
int64_t slices_of(const MoeCudaTensors& t) {
    return (row_bytes(t) + kFewSlice - 1) / kFewSlice;
}
int64_t groups_of(const MoeCudaArgs& args) {
    const int64_t outputs = int64_t{kFewDownOutputs} * kBlocks * args.sm_count;
    return (args.weights->tensors.hidden + outputs - 1) / outputs;
}
int64_t parts_bytes(const MoeCudaArgs& args) {
    const int64_t rows = groups_of(args) * args.tokens * (args.k + 1);
    return rows * slices_of(args.weights->tensors) * kFewDownOutputs * 4;
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
                .exchange = reinterpret_cast<FewExchange*>(inputs.exchange),
                .act_bytes = static_cast<int32_t>(row_bytes(t)),
                .slices = static_cast<int32_t>(slices_of(t)),
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

// Of a multiprocessor, for which blocks count what they ask for and a kilobyte more.
constexpr int kMultiprocessorShared = 228 << 10;
constexpr int64_t all_shared_bytes(int64_t parts) {
    return kBlocks * (parts + static_cast<int64_t>(sizeof(FewShared)) + 1024);
}
static_assert(all_shared_bytes(kSharedMax) <= kMultiprocessorShared,
              "blocks that wait for others must be resident");

// The most that a call so far has needed: the attribute is the function's, and a graph may hold calls of
// layers that differ.
template <bool Fp8>
int shared_percent(int64_t parts) {
    static std::atomic<int> most = 0;
    const auto percent =
        static_cast<int>((100 * all_shared_bytes(parts) + kMultiprocessorShared - 1) / kMultiprocessorShared);
    int before = most.load();
    while (before < percent && !most.compare_exchange_weak(before, percent)) {
    }
    return std::max(before, percent);
}

template <bool Fp8>
void launch(cudaStream_t stream, const MoeCudaArgs& args, const FewExpertsInputs& inputs) {
    const auto kernel = few_experts_kernel<Fp8>;
    const int64_t bytes = parts_bytes(args);
    cuda_check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedMax));
    // A multiprocessor must have room for both blocks at once: where one alone fits, it would wait for the
    // other. So they ask for as much, and for no more, since loads on their way need lines of the level-1
    // cache.
    cuda_check(cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout,
                                    shared_percent<Fp8>(bytes)));
    cuda_check(launch_dependent({.grid = dim3(static_cast<unsigned>(kBlocks * args.sm_count)),
                                 .threads = 32 * kFewWarps,
                                 .shared_bytes = static_cast<int>(bytes),
                                 .stream = stream},
                                kernel, few_args(args, inputs)));
}

}  // namespace

int64_t few_exchange_bytes() {
    return kFewExchangeBytes;
}

bool few_experts_serves(const MoeCudaArgs& args) {
    const MoeCudaTensors& t = args.weights->tensors;
    return !args.batch_invariant && args.tokens <= kFewTokens && args.tokens * args.k <= kFewPairs &&
           args.tokens * (args.k + 1) * row_bytes(t) <= kFewActBytes && t.hidden <= kFewHiddenMax &&
           std::max(t.width, t.shared_width) <= kFewUnitsMax * kFewGateOutputs &&
           parts_bytes(args) <= kSharedMax;
}

void few_experts_cuda(cudaStream_t stream, const MoeCudaArgs& args, const FewExpertsInputs& inputs) {
    check(few_experts_serves(args), "moe: not a call of few tokens");
    if (few_one_serves(args)) {
        few_one_cuda(stream, args, inputs);
        return;
    }
    if (args.weights->tensors.dtype == DType::kFloat8E4M3) {
        launch<true>(stream, args, inputs);
    } else {
        launch<false>(stream, args, inputs);
    }
}

}  // namespace tessera

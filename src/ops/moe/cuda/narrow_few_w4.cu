#include "device/cuda/cuda_check.h"
#include "ops/moe/cuda/narrow_few_down_w4.cuh"
#include "ops/moe/cuda/narrow_few_w4.cuh"
#include "ops/moe/cuda/narrow_few_w4.h"

namespace tessera::cuda {
namespace {

template <int N>
void launch_gate_up(cudaStream_t stream, const NarrowFewArgs& args, int multiprocessors) {
    constexpr int kBytes = NarrowFewShape<N>::kBytes;
    cuda_check(
        cudaFuncSetAttribute(narrow_few_kernel<N>, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes));
    cuda_check(launch_dependent({.grid = dim3(static_cast<unsigned>(multiprocessors)),
                                 .threads = kNarrowFewThreads,
                                 .shared_bytes = kBytes,
                                 .stream = stream},
                                narrow_few_kernel<N>, args));
}

}  // namespace

bool narrow_few_serves(const NarrowSizes& sizes) {
    return sizes.width == kNarrowWidth && sizes.tokens <= kNarrowFewTokens && sizes.k <= kNarrowFewK &&
           sizes.experts <= kNarrowFewExperts && sizes.hidden <= kNarrowFewHidden;
}

void launch_narrow_few(cudaStream_t stream, const NarrowFewArgs& args, int multiprocessors) {
    if (args.tokens <= kNarrowFewTokens / 2) {
        launch_gate_up<kNarrowFewTokens / 2>(stream, args, multiprocessors);
    } else {
        launch_gate_up<kNarrowFewTokens>(stream, args, multiprocessors);
    }
    cuda_check(cudaFuncSetAttribute(narrow_few_down_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                    FewDownMemory::kBytes));
    cuda_check(launch_dependent({.grid = dim3(static_cast<unsigned>(2 * args.hidden / kFewDownOutputs)),
                                 .threads = kFewDownThreads,
                                 .shared_bytes = FewDownMemory::kBytes,
                                 .stream = stream,
                                 .cluster = 2},
                                narrow_few_down_kernel, args));
}

}  // namespace tessera::cuda

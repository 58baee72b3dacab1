#include "device/cuda/cuda_check.h"
#include "ops/moe/cuda/narrow_fp8.cuh"

namespace tessera::cuda {
namespace {

// So that a row's place in out has 32 bits.
constexpr int64_t kNarrowFp8HiddenMax = 8192;

}  // namespace

bool narrow_fp8_serves(const NarrowSizes& sizes, int64_t shared_tokens, int multiprocessors) {
    return sizes.hidden % 256 == 0 && sizes.hidden <= kNarrowFp8HiddenMax &&
           narrow_plan_fits(sizes, NarrowFp8Shape::kRowsMax, shared_tokens, multiprocessors);
}

void launch_narrow_fp8(cudaStream_t stream, const NarrowFp8Args& args, int multiprocessors) {
    cuda_check(cudaFuncSetAttribute(narrow_fp8_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                    NarrowFp8Shape::kBytes));
    cuda_check(launch_dependent({.grid = dim3(static_cast<unsigned>(multiprocessors / 2 * 2)),
                                 .threads = kNarrowThreads,
                                 .shared_bytes = NarrowFp8Shape::kBytes,
                                 .stream = stream},
                                narrow_fp8_kernel, args));
}

}  // namespace tessera::cuda

#include <algorithm>

#include "device/cuda/cuda_check.h"
#include "ops/moe/cuda/narrow_fp8.cuh"

namespace tessera::cuda {

bool narrow_fp8_serves(const NarrowSizes& sizes, int64_t shared_tokens, int multiprocessors) {
    constexpr int64_t kRows = NarrowFp8Shape::kRowsMax;
    const int64_t clusters = multiprocessors / 2;
    const int64_t pairs = sizes.tokens * sizes.k;
    // As narrow_w4_serves().
    const int64_t items =
        pairs / kRows + std::min(sizes.experts, pairs) + (shared_tokens + kRows - 1) / kRows;
    return sizes.width == kNarrowWidth && sizes.hidden % 256 == 0 && pairs <= kNarrowPairsMax &&
           sizes.experts <= kNarrowExpertsMax && items <= clusters * kNarrowItemsMax &&
           sizes.tokens / kRows < clusters;
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

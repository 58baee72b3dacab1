#include "base/check.h"
#include "device/cuda/cuda_check.h"
#include "ops/moe/cuda/narrow_w4.cuh"

namespace tessera::cuda {
namespace {

template <int RowsMax>
void launch_shape(cudaStream_t stream, const NarrowW4Args& args, int multiprocessors) {
    using Shape = NarrowW4Shape<RowsMax>;
    cuda_check(cudaFuncSetAttribute(narrow_w4_kernel<Shape>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                    Shape::kBytes));
    cuda_check(launch_dependent({.grid = dim3(static_cast<unsigned>(multiprocessors / 2 * 2)),
                                 .threads = kNarrowThreads,
                                 .shared_bytes = Shape::kBytes,
                                 .stream = stream},
                                narrow_w4_kernel<Shape>, args));
}

}  // namespace

bool narrow_w4_serves(const NarrowSizes& sizes, int rows_max, int multiprocessors) {
    return narrow_plan_fits(sizes, rows_max, 0, multiprocessors);
}

void launch_narrow_inputs(cudaStream_t stream, const NarrowInputsArgs& args, int64_t tokens) {
    cuda_check(launch_dependent(
        {.grid = dim3(static_cast<unsigned>(tokens)), .threads = kNarrowInputThreads, .stream = stream},
        narrow_inputs_kernel, args));
}

void launch_narrow_w4(cudaStream_t stream, const NarrowW4Args& args, int rows_max, int multiprocessors) {
    if (rows_max == kNarrowShortRows) {
        launch_shape<kNarrowShortRows>(stream, args, multiprocessors);
    } else if (rows_max == kNarrowSomeRows) {
        launch_shape<kNarrowSomeRows>(stream, args, multiprocessors);
    } else {
        check(rows_max == kNarrowManyRows, "moe: no such items");
        launch_shape<kNarrowManyRows>(stream, args, multiprocessors);
    }
}

}  // namespace tessera::cuda

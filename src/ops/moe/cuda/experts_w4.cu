#include "device/cuda/cuda_check.h"
#include "ops/moe/cuda/experts_w4.cuh"

namespace tessera::cuda {
namespace {

using W4NarrowShape = ExpertsW4Shape<1, kW4NarrowTile, 20>;
using W4BroadShape = ExpertsW4Shape<2, kW4BroadTile, 7>;

template <typename Shape>
void launch_shape(cudaStream_t stream, const ExpertsW4Args& args, int blocks) {
    cuda_check(cudaFuncSetAttribute(experts_w4_kernel<Shape>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                    Shape::kBytes));
    cuda_check(launch_dependent({.grid = dim3(static_cast<unsigned>(blocks)),
                                 .threads = kExpertsThreads,
                                 .shared_bytes = Shape::kBytes,
                                 .stream = stream},
                                experts_w4_kernel<Shape>, args));
}

}  // namespace

void launch_experts_w4(cudaStream_t stream, const ExpertsW4Args& args, int tile_max, int blocks) {
    if (tile_max == kW4NarrowTile) {
        launch_shape<W4NarrowShape>(stream, args, blocks);
    } else {
        launch_shape<W4BroadShape>(stream, args, blocks);
    }
}

}  // namespace tessera::cuda

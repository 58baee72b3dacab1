#include "device/cuda/cuda_check.h"
#include "ops/moe/cuda/experts_w4.cuh"

namespace tessera::cuda {
namespace {

using W4BroadShape = ExpertsW4Shape<2, kW4BroadTile, 7>;
using W4FewShape = ExpertsW4Shape<2, kW4FewTile, 4, 2>;
using W4PairShape = ExpertsW4Shape<1, kW4PairTile, 6, 2>;
using W4WideShape = ExpertsW4Shape<1, kW4WideTile, 6>;

template <typename Shape>
void launch_shape(cudaStream_t stream, const ExpertsW4Args& args, int multiprocessors,
                  const ExpertsLook& look = {}) {
    cuda_check(cudaFuncSetAttribute(experts_w4_kernel<Shape>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                    Shape::kBytes));
    if (Shape::kResident > 1) {  // all blocks must run at once: each begins with the tile of its own number
        cuda_check(cudaFuncSetAttribute(experts_w4_kernel<Shape>,
                                        cudaFuncAttributePreferredSharedMemoryCarveout,
                                        cudaSharedmemCarveoutMaxShared));
    }
    cuda_check(launch_dependent({.grid = dim3(static_cast<unsigned>(Shape::kResident * multiprocessors)),
                                 .threads = kExpertsThreads,
                                 .shared_bytes = Shape::kBytes,
                                 .stream = stream},
                                experts_w4_kernel<Shape>, args, look));
}

}  // namespace

void launch_experts_w4(cudaStream_t stream, const ExpertsW4Args& args, int tile_max, int multiprocessors) {
    if (tile_max == kW4WideTile) {
        launch_shape<W4WideShape>(stream, args, multiprocessors);
    } else if (tile_max == kW4FewTile) {
        launch_shape<W4FewShape>(stream, args, multiprocessors);
    } else if (tile_max == kW4PairTile) {
        launch_shape<W4PairShape>(stream, args, multiprocessors);
    } else {
        launch_shape<W4BroadShape>(stream, args, multiprocessors);
    }
}

}  // namespace tessera::cuda

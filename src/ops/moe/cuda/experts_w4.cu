#include "ops/moe/cuda/experts_grouped.cuh"
#include "ops/moe/cuda/w4_weights.cuh"

namespace tessera::cuda {
namespace {

using W4BroadShape = ExpertsGroupedShape<W4Units, 2, kW4BroadTile, 7>;
using W4FewShape = ExpertsGroupedShape<W4Units, 2, kW4FewTile, 4, 2>;
using W4PairShape = ExpertsGroupedShape<W4Units, 1, kW4PairTile, 6, 2>;
using W4WideShape = ExpertsGroupedShape<W4Units, 1, kW4WideTile, 6>;

}  // namespace

void launch_experts_w4(cudaStream_t stream, const ExpertsGroupedArgs& args, int tile_max,
                       int multiprocessors) {
    if (tile_max == kW4WideTile) {
        launch_grouped<W4WideShape>(stream, args, multiprocessors);
    } else if (tile_max == kW4FewTile) {
        launch_grouped<W4FewShape>(stream, args, multiprocessors);
    } else if (tile_max == kW4PairTile) {
        launch_grouped<W4PairShape>(stream, args, multiprocessors);
    } else {
        launch_grouped<W4BroadShape>(stream, args, multiprocessors);
    }
}

}  // namespace tessera::cuda

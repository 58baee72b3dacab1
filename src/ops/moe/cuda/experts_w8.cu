#include "ops/moe/cuda/experts_grouped.cuh"
#include "ops/moe/cuda/w8_weights.cuh"

namespace tessera::cuda {

void launch_experts_w8(cudaStream_t stream, const ExpertsGroupedArgs& args, int tile_max,
                       int multiprocessors) {
    using Pair = ExpertsGroupedShape<W8Units, 1, kW8PairTile, 4, 2>;
    using Wide = ExpertsGroupedShape<W8Units, 1, kW8WideTile, 5>;
    if (tile_max == kW8PairTile) {
        launch_grouped<Pair>(stream, args, multiprocessors);
    } else {
        launch_grouped<Wide>(stream, args, multiprocessors);
    }
}

}  // namespace tessera::cuda

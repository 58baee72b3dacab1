#include "device/cuda/cuda_check.h"
#include "ops/moe/cuda/plan.cuh"
#include "ops/moe/cuda/plan.h"

namespace tessera::cuda {

void launch_plan(cudaStream_t stream, const PlanArgs& args) {
    const int cluster = args.tokens * args.k > kPlanPairs ? kPlanCluster : 1;
    const int quantizing = args.x != nullptr ? (args.tokens + kQuantizeRows - 1) / kQuantizeRows : 0;
    const int blocks = cluster + (quantizing + cluster - 1) / cluster * cluster;
    cuda_check(launch_dependent({.grid = dim3(static_cast<unsigned>(blocks)),
                                 .threads = kPlanThreads,
                                 .stream = stream,
                                 .cluster = cluster},
                                plan_kernel, args));
}

void launch_sort_rows(cudaStream_t stream, const SortRowsArgs& args) {
    constexpr int kRows = kSortRowsThreads / 32;
    cuda_check(launch_dependent({.grid = dim3(static_cast<unsigned>((args.pairs + kRows - 1) / kRows)),
                                 .threads = kSortRowsThreads,
                                 .stream = stream},
                                sort_rows_kernel, args));
}

}  // namespace tessera::cuda

// The experts' kernel: gate and up products with SwiGLU, then the down products, in one launch.
//
// Roofline: at few tokens the weights of every chosen expert are read once (H200: bytes / 4.27 TB/s); at
// many, 2 * rows * outputs * inputs operations at the wgmma rate (0.8 PFLOP/s bfloat16, 1.3 to 1.5 fp8).
//
// Schedule: a persistent block of three or four warpgroups on each multiprocessor. In one, a warp takes tiles
// from a common list (all gate and up tiles, then all down tiles), one brings weights, two bring the tokens'
// rows; a down tile waits for its item's rows of act, and its weights do not. The others consume: the weights
// are the M side of wgmma, the tokens' rows the N side, which is as wide as the item, in steps of 16.
#pragma once

#include "ops/moe/cuda/experts_consume.cuh"
#include "ops/moe/cuda/experts_produce.cuh"

namespace tessera::cuda {

template <bool Fp8, typename Shape>
__global__ void __launch_bounds__(Shape::kThreads, 1)
    experts_kernel(const __grid_constant__ ExpertsArgs args, const ExpertsLook look) {
    extern __shared__ __align__(1024) uint8_t shared_raw[];
    const ExpertsMemory<Shape> memory{.base = shared_raw, .address = shared_address(shared_raw)};
    const int warpgroup = static_cast<int>(threadIdx.x / 128);
    if (threadIdx.x == 0) {
        experts_init_barriers(memory);
    } else if (threadIdx.x == 32) {
        prefetch_map(&args.routed.gate_up);
        prefetch_map(&args.shared.gate_up);
    }
    __syncthreads();
    let_next_kernel_start();
    if (warpgroup == Shape::kConsumers) {
        registers_give<Shape::kBringRegisters>();
        const int warp = static_cast<int>(threadIdx.x % 128 / 32);
        float scale = 1;
        int early_steps = 0;
        {
            const ExpertsTile tile = experts_early_tile<Shape>(args, memory);
            early_steps = experts_early_steps<Fp8>(args, tile);
            if (warp == 0) {
                scale = experts_raw_scale<Fp8>(args, tile, static_cast<int>(threadIdx.x % 32));
            } else if (threadIdx.x % 128 == 32 && early_steps > 0) {
                ExpertsRing<Shape::kStages> stages = memory.stages();
                experts_bring_steps<Fp8>(args, memory, stages, tile, {.end = early_steps});
            }
            __syncwarp();
        }
        if constexpr (Shape::kOwnPlan) {
            if (has_own_plan<Shape>(args)) {
                wait_for_previous_kernel();
                own_plan(args, memory);
            }
        }
        if (warp == 0) {
            experts_schedule<Fp8>(args, memory, look, scale);
        } else if (warp == 1) {
            if (threadIdx.x % 32 == 0) {
                experts_bring_weights<Fp8>(args, memory, look, early_steps);
            }
        } else {
            experts_bring_rows<Fp8>(args, memory, static_cast<int>(threadIdx.x % 64));
        }
    } else {
        registers_take<Shape::kConsumeRegisters>();
        experts_consume<Fp8>(args, memory, look, warpgroup);
    }
}

}  // namespace tessera::cuda

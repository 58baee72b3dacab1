// How the experts' kernel of grouped weights is started.
#pragma once

#include <cstdint>

#include <cuda_runtime_api.h>

#include "ops/moe/cuda/experts.cuh"
#include "ops/moe/grouped_layout.h"

namespace tessera::cuda {

// `experts.routed` alone is used: x [tokens, hidden] and act are e4m3; the scales and maps of weights in it
// are not used.
struct ExpertsGroupedArgs {
    ExpertsArgs experts;
    const uint8_t* gate_up = nullptr;  // [experts, w4_gate_up_bytes() or w8_gate_up_bytes()]
    const uint8_t* down = nullptr;     // [experts, w4_down_bytes() or w8_down_bytes()]
    uint16_t* act_bf16 = nullptr;      // [sorted rows, width]: act before its rows have a scale
    float* act_scale = nullptr;        // [sorted rows]
    int32_t* stored = nullptr;         // [items]: tiles of act_bf16 that are stored; 0 at first
};

inline constexpr int kW4FewTile = 32;   // two blocks a multiprocessor
inline constexpr int kW4PairTile = 48;  // the same
inline constexpr int kW4BroadTile = 96;
inline constexpr int kW4WideTile = 176;
inline constexpr int kW8PairTile = 48;  // two blocks a multiprocessor
inline constexpr int kW8WideTile = 176;

// tile_max: one of the above; plan.cuh cuts the items by it.
void launch_experts_w4(cudaStream_t stream, const ExpertsGroupedArgs& args, int tile_max,
                       int multiprocessors);
void launch_experts_w8(cudaStream_t stream, const ExpertsGroupedArgs& args, int tile_max,
                       int multiprocessors);

}  // namespace tessera::cuda

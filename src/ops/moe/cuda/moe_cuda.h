// moe on CUDA: y += sum over the chosen experts of w * down(silu(gate x) * up x), + the shared expert.
// Without routed experts it is a dense SwiGLU layer (the shared weights alone).
//
// Three launches: the plan sorts the (token, expert) pairs by expert; one kernel for gate, up, SwiGLU and
// down; combine. Before them x is quantised, if the caller has not. All sizes that depend on the routing stay
// on the device. Each may start while the one before it ends (ops/common/cuda/dependent_launch.cuh). Up to
// 1,024 pairs, of 256 experts or fewer and of 64 rows or fewer each, every block of the second makes the plan
// for itself. Up to 8 tokens take one launch and no list; fp8 experts of width 192, from 40 pairs on and with
// up to 44 rows an expert on the average, the shared one's among them, two launches without a plan
// (narrow_fp8.cuh).
//
// Routed experts may be grouped: int4 (kInt4), or e4m3 with a scale for each block of 128 x 128
// (fp8_blocks), with e4m3 activations whose scales are made here: one a token, one a row of act. Groups of
// 128 inputs have float32 sums of their own. The shared expert is bfloat16 then, by a launch of its
// own; with many rows an expert another copies x into their order. int4 experts of width 192 with up to 48
// rows each need no plan (narrow_w4.cuh), and up to 16 tokens two kernels without rows of out
// (narrow_few_w4.cuh); one token of experts up to 192 wide takes one kernel (few_one_w4.cuh).
//
// Rounding: sums in float32; the SwiGLU result, each expert's output, the routed sum, routed + shared, and y
// each round to bfloat16 (a float32 sum of the two bfloat16 outputs, rounded, is the same). A token adds its
// experts in the order of `chosen` (ascending ids); narrow int4 experts of up to 16 tokens may be added in
// another. With batch_invariant the order is always that, and a token's bits do not depend on the batch. The
// ids of a token differ from each other.
#pragma once

#include <cstddef>
#include <cstdint>

#include <cuda.h>
#include <cuda_runtime_api.h>

#include "base/dtype.h"

namespace tessera {

// A layer's weights in device memory. Each matrix is plain, [outputs, inputs], and 16-byte aligned. The
// scales are used with fp8 weights only: w = weight * scale, x = e4m3(x / input_scale).
struct MoeCudaTensors {
    // kBFloat16, kFloat8E4M3, or of the routed experts kInt4. The shared one is bfloat16 beside grouped ones.
    DType dtype = DType::kBFloat16;
    bool fp8_blocks = false;  // kFloat8E4M3: the routed experts are grouped
    int64_t hidden = 0;
    int64_t experts = 0;       // 0: a dense layer
    int64_t width = 0;         // of a routed expert
    int64_t shared_width = 0;  // 0: no shared expert
    // kInt4: units of w4_layout.h, [experts, w4_gate_up_bytes()] and [experts, w4_down_bytes()]; fp8_blocks:
    // the same of w8_layout.h.
    const void* gate_up = nullptr;         // [experts, 2 * width, hidden]: gate rows, then up rows
    const void* down = nullptr;            // [experts, hidden, width]
    const void* shared_gate_up = nullptr;  // [2 * shared_width, hidden]
    const void* shared_down = nullptr;     // [hidden, shared_width]
    // In device memory, float32, one for each expert (the shared scales: for the one).
    const float* gate_up_scale = nullptr;            // [experts, 2]: gate, up
    const float* down_scale = nullptr;               // [experts]
    const float* down_input_scale = nullptr;         // [experts]
    const float* shared_gate_up_scale = nullptr;     // [2]
    const float* shared_down_scale = nullptr;        // [1]
    const float* shared_down_input_scale = nullptr;  // [1]
    // All experts of a layer share this one; the shared expert's may differ, which costs a pass over x.
    float input_scale = 1;
    float shared_input_scale = 1;

    // Whether the routed weights are units with scales of groups, and activations are quantised here.
    bool grouped() const { return dtype == DType::kInt4 || fp8_blocks; }
};

struct MoeCudaMaps {
    CUtensorMap gate_up;
    CUtensorMap gate_up_fine;    // for few tokens
    CUtensorMap gate_up_thirds;  // of ExpertsThirdsShape and narrow_fp8.cuh, e4m3
    CUtensorMap down;
    CUtensorMap down_fine;
    CUtensorMap down_thirds;
};
// The tensors with their tensor maps: made once at start; the device memory must outlive it.
struct MoeCudaWeights {
    MoeCudaTensors tensors;
    MoeCudaMaps routed;
    MoeCudaMaps shared;
};

// REQUIRES: hidden, width and shared_width multiples of 16; at most 1,024 experts. Grouped: at least one
// expert, hidden a multiple of 128 and at most 8,192, width a multiple of 64 and at most 2,048.
MoeCudaWeights moe_cuda_bind(const MoeCudaTensors& tensors);

inline constexpr int64_t kMoeCudaTokensMax = 65535;  // a row of blocks each

struct MoeCudaArgs {
    const MoeCudaWeights* weights = nullptr;
    const void* x = nullptr;  // [tokens, hidden] bfloat16
    // [tokens, hidden] e4m3(x / input_scale), of a dense layer e4m3(x / shared_input_scale), as rms_norm_cuda
    // makes it; null: made here. fp8 weights only, not grouped ones.
    const uint8_t* x8 = nullptr;
    int64_t tokens = 0;  // 0 .. kMoeCudaTokensMax
    int64_t k = 0;       // 0 in a dense layer
    // [tokens, k]: ids of the experts that are here. Any other id, below 0 or from `experts` on, counts for
    // nothing: padding, or an expert of another rank, whose ids are the layer's less this rank's first.
    const int32_t* chosen = nullptr;
    const float* expert_weights = nullptr;  // [tokens, k]
    void* y = nullptr;                      // [tokens, hidden] bfloat16
    // moe_cuda_workspace_bytes(), 256-byte aligned; one call at a time. All bytes are 0xFF before the first
    // call of any layer, since launches for few tokens leave marks there for the next.
    std::byte* workspace = nullptr;
    int sm_count = 0;              // of the device; the same in all calls with a workspace
    bool batch_invariant = false;  // a token's bits do not depend on the batch
};

int64_t moe_cuda_workspace_bytes(const MoeCudaTensors& tensors, int64_t tokens_max, int64_t k);

void moe_cuda(cudaStream_t stream, const MoeCudaArgs& args);

}  // namespace tessera

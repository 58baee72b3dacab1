// A token's sum over its experts: in the order of `chosen`, in float32; then the shared expert; then y.
#pragma once

#include <cstdint>

#include <cuda_bf16.h>
#include <cuda_runtime_api.h>

namespace tessera::cuda {

struct CombineArgs {
    const __nv_bfloat16* out = nullptr;  // [rows, hidden]
    const int32_t* slots = nullptr;      // [tokens, k]: the pairs' rows, below 0 without one
    // > 0: a pair's row is its own number, and `slots` are ids of experts, which count in [0, own_below). The
    // rows of other ids are read, too, since no load waits for the ids, and are not added.
    int32_t own_below = 0;
    const float* weights = nullptr;  // [tokens, k]
    int32_t hidden = 0;
    int32_t k = 0;
    int32_t shared_row = -1;     // of token 0; -1 without a shared expert
    __nv_bfloat16* y = nullptr;  // [tokens, hidden]
    // Rows that are added are not written to memory. REQUIRES: own_below, hidden a multiple of 64, out
    // 128-byte aligned.
    bool drop_rows = false;
};

void launch_combine(cudaStream_t stream, const CombineArgs& args, int64_t tokens);

}  // namespace tessera::cuda

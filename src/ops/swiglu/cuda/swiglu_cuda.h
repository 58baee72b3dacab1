// swiglu on the device: y = bf16(silu(gate)) * up, rounded to bfloat16, and y8 = e4m3(y / y8_scale) where
// asked for.
#pragma once

#include <cstdint>

#include <cuda_bf16.h>
#include <cuda_runtime_api.h>

namespace tessera {

struct SwigluCudaArgs {
    // [rows, width] each. One matrix [rows, 2 * width] with the gates first has up = gate + width.
    const __nv_bfloat16* gate = nullptr;
    const __nv_bfloat16* up = nullptr;
    int64_t in_stride = 0;       // elements between rows, of both; every stride is a multiple of 8
    __nv_bfloat16* y = nullptr;  // [rows, width]; null: not wanted
    int64_t y_stride = 0;
    uint8_t* y8 = nullptr;  // [rows, width] e4m3; null: not wanted
    int64_t y8_stride = 0;
    float y8_scale = 1;  // > 0
    int64_t rows = 0;
    int64_t width = 0;  // a multiple of 8
};

// May start before the kernel before it in the stream has ended (programmatic dependent launch), and waits
// for it before it reads or writes.
void swiglu_cuda(cudaStream_t stream, const SwigluCudaArgs& args);

}  // namespace tessera

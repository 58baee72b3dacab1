// rms_norm on the device, with the residual add before it and the FP8 rounding after it where they are asked
// for:
//
//   x += add                              rounded to bfloat16, kept in x (the residual stream)
//   y  = weight * bf16(x / sqrt(mean(x^2) + eps))   rounded to bfloat16
//   y8 = e4m3(y / y8_scale)               saturating; or with a scale of the row's own: its largest |y| / 448
//
// The mean is in float32. A row's result depends on that row alone.
#pragma once

#include <cstdint>

#include <cuda_bf16.h>
#include <cuda_runtime_api.h>

namespace tessera {

struct RmsNormCudaArgs {
    __nv_bfloat16* x = nullptr;          // [.., width]; written only when `add` is given
    int64_t x_stride = 0;                // elements between rows; every stride is a multiple of 8
    const __nv_bfloat16* add = nullptr;  // [.., width], in the rows of x; null: nothing is added
    int64_t add_stride = 0;
    // [rows]: the row of x and `add` that row r of y is made from; null: row r. A negative one is passed
    // over. REQUIRES: distinct where `add` is given
    const int32_t* x_rows = nullptr;
    const __nv_bfloat16* weight = nullptr;  // [width]
    __nv_bfloat16* y = nullptr;             // [rows, width]; null: not wanted; must not overlap x
    int64_t y_stride = 0;
    uint8_t* y8 = nullptr;  // [rows, width] e4m3; null: not wanted
    int64_t y8_stride = 0;
    float y8_scale = 1;
    float* y8_row_scale = nullptr;  // [rows]: written, and used in place of y8_scale; may be null
    int64_t rows = 0;
    int64_t width = 0;  // a multiple of 8, at most 16384
    float eps = 0;
};

void rms_norm_cuda(cudaStream_t stream, const RmsNormCudaArgs& args);

}  // namespace tessera

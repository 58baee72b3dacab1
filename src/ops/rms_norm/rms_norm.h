// rms_norm: y = w * x / sqrt(mean(x^2) + eps), row by row.
//
// The sum of squares runs in 16 interleaved chains of fused multiply-adds (chain i takes the elements k = i
// mod 16), then halves: chain i + chain i + 8, 4, 2, 1. So a row gives the same bits on every machine and in
// any batch.
#pragma once

#include <cstdint>

#include "ops/op_context.h"

namespace tessera {

struct RmsNormArgs {
    const float* x = nullptr;       // [rows, width]
    int64_t x_stride = 0;           // floats between rows
    const float* weight = nullptr;  // [width]
    float* y = nullptr;             // [rows, width]; may be x
    int64_t y_stride = 0;
    int64_t rows = 0;
    int64_t width = 0;
    float eps = 0;
};

void rms_norm(const OpContext& context, const RmsNormArgs& args);
void rms_norm_ref(const RmsNormArgs& args);

}  // namespace tessera

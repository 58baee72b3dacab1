// linear: y = x W^T, or y += x W^T (the residual add), for any number of rows.
//
// The order of every sum is gemm.h's: one chain over k, then the column scale, then the add. So the bits of a
// row depend on neither the batch nor the threads.
#pragma once

#include <cstdint>

#include "ops/common/fetch_ahead.h"
#include "ops/common/packed_matrix.h"
#include "ops/op_context.h"

namespace tessera {

struct LinearArgs {
    const float* x = nullptr;         // [>= rows, inputs]
    int64_t x_stride = 0;             // floats between rows
    const int32_t* x_rows = nullptr;  // [rows]: the row of x for each row of y; null = the same
    int64_t rows = 0;
    const PackedMatrix* weight = nullptr;
    float* y = nullptr;  // [rows, outputs]
    int64_t y_stride = 0;
    int64_t outputs = 0;          // columns of y that are written: at most weight->outputs
    bool accumulate = false;      // y += instead of y =
    FetchAhead* ahead = nullptr;  // what the threads read next; may be null
};

void linear(const OpContext& context, const LinearArgs& args);
void linear_ref(const LinearArgs& args);

}  // namespace tessera

// Reads int4 weights of any layout in one form: what the backends pack their own layouts from.
#pragma once

#include <cstdint>

#include "weights/model_weights.h"

namespace tessera {

// Rows [first, first + rows) of an int4 weight.
struct Int4Rows {
    const LinearWeights* linear = nullptr;  // int4 is set
    int64_t first = 0;
    int64_t rows = 0;
    uint8_t* codes = nullptr;    // [rows, cols / 2]: low nibble = even column; two's complement
    uint16_t* scales = nullptr;  // [rows, cols / 128] bfloat16; may be null
};

// Sixteen or more rows at a time cost least where the tensor is stored the other way round. Pure; any thread.
void int4_rows(const Int4Rows& args);

}  // namespace tessera

// embed: rows of the embedding table as float32.
#pragma once

#include <cstdint>

#include "base/dtype.h"
#include "ops/op_context.h"

namespace tessera {

struct EmbedArgs {
    const void* table = nullptr;     // [vocab, width], row-major
    DType dtype = DType::kBFloat16;  // kBFloat16, kFloat16 or kFloat32
    int64_t width = 0;
    const int32_t* tokens = nullptr;  // [rows], each in [0, vocab)
    int64_t rows = 0;
    float* y = nullptr;  // [rows, width]
    int64_t y_stride = 0;
};

void embed(const OpContext& context, const EmbedArgs& args);

}  // namespace tessera

// One decoder block: residual += attention(norm(residual)); residual += MLP(norm(residual)).
#pragma once

#include "model/packed_weights.h"
#include "model/step.h"

namespace tessera {

void decoder_block(Step& step, const PackedLayer& layer, int64_t kv_layer);

// y [T, hidden] = RMSNorm(x), both with a row stride in floats.
struct Rows {
    float* data = nullptr;
    int64_t stride = 0;
};
void norm_rows(Step& step, Rows x, const float* weight, Rows y);

}  // namespace tessera

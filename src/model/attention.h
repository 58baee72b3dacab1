// Self-attention of one layer: q/k/v projection, q/k norm, RoPE, KV store, attention, output projection.
#pragma once

#include "model/packed_weights.h"
#include "model/step.h"

namespace tessera {

// residual += attention(normed). kv_layer: which layer of the pages.
void self_attention(Step& step, const PackedLayer& layer, int64_t kv_layer);

}  // namespace tessera

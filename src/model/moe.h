// The feed-forward half of one layer: router, experts and shared expert, or a dense SwiGLU.
#pragma once

#include "model/packed_weights.h"
#include "model/step.h"

namespace tessera {

// residual += MLP(normed); leaves the router's logits in the workspace.
void feed_forward(Step& step, const PackedLayer& layer);

}  // namespace tessera

// A model without a checkpoint: the shapes and scales of a config, whose elements upload_weights() draws on
// the device. Activations stay near 1 and the routing near uniform, so that it costs what a trained model
// costs.
#pragma once

#include "base/dtype.h"
#include "types/model_config.h"
#include "weights/model_weights.h"

namespace tessera {

// Views without data. `dtype` is that of the projections: kBFloat16, or kFloat8E4M3 with static scales as a
// published checkpoint has them; embedding, head, router and norms are bfloat16.
ModelWeights random_weights(const ModelConfig& config, DType dtype);

// Deviation of the stored elements: 1 / sqrt(inputs) in bfloat16. In e4m3 they fill the format's range, and
// the weight's scale makes 1 / sqrt(inputs) of it.
float random_deviation(DType dtype, int64_t inputs);

}  // namespace tessera

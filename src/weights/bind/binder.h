// Binds the tensors of a checkpoint to the members of ModelWeights and checks that each has the shape and
// type that the config makes it have, that none is missing and that none is left over.
#pragma once

#include "base/status.h"
#include "types/model_config.h"
#include "weights/checkpoint/checkpoint.h"
#include "weights/config/quant_config.h"
#include "weights/model_weights.h"

namespace tessera {

// The views point into `checkpoint`. The error is that of the first wrong tensor in the order of the model.
Result<ModelWeights> bind_weights(const ModelConfig& config, const QuantConfig& quant,
                                  Checkpoint& checkpoint);

}  // namespace tessera

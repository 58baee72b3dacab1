// The tensors of a model in the official FP8 release's form, as outputs that are made when they are written.
#pragma once

#include <vector>

#include "base/status.h"
#include "base/thread_pool.h"
#include "types/model_config.h"
#include "weights/export/safetensors_writer.h"
#include "weights/fp8_export.h"
#include "weights/model_weights.h"

namespace tessera {

struct Fp8Tensors {
    std::vector<OutputTensor> weights;    // under their published names, in the model's order
    std::vector<OutputTensor> kv_scales;  // for kv_cache_scales.safetensors
};

// The outputs point into `weights` and use `pool` when they are made. An error names a projection whose
// weight is not finite. REQUIRES: a LayerLimits for every layer.
Result<Fp8Tensors> fp8_tensors(const ModelConfig& config, const ModelWeights& weights,
                               const std::vector<LayerLimits>& limits, ThreadPool& pool);

}  // namespace tessera

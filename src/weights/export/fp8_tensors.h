// The tensors of a model in the official FP8 release's form, as outputs that are made when they are written.
#pragma once

#include <vector>

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

// The outputs point into `weights` and use `pool` when they are made. REQUIRES: a LayerLimits for every
// layer.
Fp8Tensors fp8_tensors(const ModelConfig& config, const ModelWeights& weights,
                       const std::vector<LayerLimits>& limits, ThreadPool& pool);

// Of one linear in e4m3: the largest magnitude of its weight over 448.
float fp8_weight_scale(const WeightView& weight, ThreadPool& pool);
void quantize_weight(const WeightView& weight, float scale, ThreadPool& pool, std::span<std::byte> out);

}  // namespace tessera

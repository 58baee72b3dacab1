// All tensors of a model under their published names, in the model's order.
#pragma once

#include <string>
#include <vector>

#include "types/model_config.h"
#include "weights/export/safetensors_writer.h"
#include "weights/model_weights.h"

namespace tessera {

enum class LinearInput : uint8_t { kAttention, kAttentionOutput, kMlp, kDown };

// Where a projection stands.
struct LinearPlace {
    size_t layer = 0;  // the MTP layer is the last
    LinearInput input = LinearInput::kAttention;
    bool routed = false;  // of a routed expert
};

class TensorSink {
  public:
    virtual ~TensorSink() = default;
    // A tensor that no format quantises.
    virtual void plain(const std::string& name, const WeightView& view, std::vector<int64_t> shape) = 0;
    virtual void linear(const std::string& module, const LinearWeights& linear, const LinearPlace& place) = 0;
    virtual void kv_cache(const std::string& prefix, size_t layer) = 0;
};

void walk_model(const ModelConfig& config, const ModelWeights& weights, TensorSink& sink);

// The view as it is. REQUIRES: float32, bfloat16 or float16.
OutputTensor plain_tensor(const std::string& name, const WeightView& view, std::vector<int64_t> shape);

// A row of such a view as float32.
void widen_row(const WeightView& weight, int64_t row, std::vector<float>& out);

}  // namespace tessera

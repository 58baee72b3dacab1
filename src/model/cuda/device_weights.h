// The model's weights in device memory, in the layouts that the CUDA operators take. Made once at start.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include <cuda_bf16.h>

#include "base/dtype.h"
#include "base/status.h"
#include "device/cuda/buffer.h"
#include "ops/moe/cuda/moe_cuda.h"
#include "types/model_config.h"
#include "weights/model_weights.h"

namespace tessera {

// A projection [outputs, inputs], row-major. e4m3 only with a static input scale and without weight_only; any
// other dtype of a checkpoint becomes bfloat16.
struct DeviceMatrix {
    const void* data = nullptr;
    DType dtype = DType::kBFloat16;
    int64_t outputs = 0;
    int64_t inputs = 0;
    float input_scale = 1;                // e4m3: x is quantised as e4m3(x / input_scale)
    float weight_scale = 1;               // e4m3, one for all outputs; unless column_scale is set
    const float* column_scale = nullptr;  // [outputs] in device memory: q, k and v have scales of their own
    const float* row_scale = nullptr;     // [tokens_max], each input_scale: beside column_scale
};

struct DeviceLayer {
    const __nv_bfloat16* input_norm = nullptr;           // [hidden]
    const __nv_bfloat16* post_attention_norm = nullptr;  // [hidden]
    const __nv_bfloat16* q_norm = nullptr;               // [head_dim]; null without qk_norm
    const __nv_bfloat16* k_norm = nullptr;
    DeviceMatrix qkv;  // outputs: q, k, v
    DeviceMatrix o;
    float k_scale = 1;  // of an e4m3 KV cache
    float v_scale = 1;
    bool is_moe = false;
    const __nv_bfloat16* router_high = nullptr;  // [experts, hidden]: the weights in two parts
    const __nv_bfloat16* router_low = nullptr;   // null where bfloat16 holds the weights
    const float* expert_bias = nullptr;          // [experts]; null without
    MoeCudaWeights mlp;                          // experts and shared expert, or the dense SwiGLU
};

struct DeviceMtp {
    const __nv_bfloat16* embedding_norm = nullptr;
    const __nv_bfloat16* hidden_norm = nullptr;
    const __nv_bfloat16* final_norm = nullptr;
    DeviceMatrix projection;
    DeviceLayer layer;
};

struct DeviceWeights {
    std::vector<DeviceBuffer> memory;
    const __nv_bfloat16* embedding = nullptr;  // [vocab, hidden]
    DeviceMatrix lm_head;
    const __nv_bfloat16* final_norm = nullptr;
    std::vector<DeviceLayer> layers;
    DeviceMtp mtp;  // empty without an MTP layer

    int64_t bytes() const;
};

struct UploadOptions {
    bool weight_only = false;
    int64_t tokens_max = 0;
    // The views have no data: elements are drawn on the device (random_weights.h).
    std::optional<uint64_t> random_seed;
};

// Refused when the weights do not fit into the budget. Blocks until everything is on the device.
Result<DeviceWeights> upload_weights(const ModelConfig& config, const ModelWeights& weights,
                                     const UploadOptions& options, MemoryBudget& budget);

}  // namespace tessera

// The model's weights in the kernels' layouts, in one arena. Made once from the checkpoint's views.
#pragma once

#include <cstdint>
#include <vector>

#include "base/status.h"
#include "base/thread_pool.h"
#include "device/host_buffer.h"
#include "model/hy3_model.h"
#include "ops/common/packed_matrix.h"
#include "ops/moe/moe.h"
#include "weights/model_weights.h"

namespace tessera {

struct PackedLayer {
    const float* input_norm = nullptr;           // [hidden]
    const float* post_attention_norm = nullptr;  // [hidden]
    const float* q_norm = nullptr;               // [head_dim]; null without qk_norm
    const float* k_norm = nullptr;
    PackedMatrix qkv;  // outputs: q, k, v
    PackedMatrix o;
    bool is_moe = false;
    PackedMatrix router;                 // MoE layers only
    const float* expert_bias = nullptr;  // [experts]; null without
    std::vector<ExpertWeights> experts;  // empty in a dense layer
    ExpertWeights shared;                // the shared expert, or the dense SwiGLU
};

struct PackedMtp {
    const float* embedding_norm = nullptr;
    const float* hidden_norm = nullptr;
    const float* final_norm = nullptr;
    PackedMatrix projection;  // inputs: embedding half, hidden half
    PackedLayer layer;
};

struct PackedModel {
    HostBuffer arena;
    const void* embedding = nullptr;  // [vocab, hidden] as in the checkpoint
    DType embedding_dtype = DType::kBFloat16;
    PackedMatrix lm_head;
    const float* final_norm = nullptr;
    std::vector<PackedLayer> layers;
    PackedMtp mtp;  // empty without an MTP layer
};

// Names the tensors that cannot be combined (for example q and k of different dtypes).
Result<PackedModel> pack_model(const ModelConfig& config, const ModelWeights& weights,
                               const ModelOptions& options, ThreadPool& pool);

}  // namespace tessera

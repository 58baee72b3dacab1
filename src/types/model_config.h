// ModelConfig: every hy_v3 field of config.json that changes what an engine computes, as the file states it.
// Made only by weights/config.h, which refuses a file that lacks one; nothing is assumed.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace tessera {

using TokenId = int32_t;

struct ModelConfig {
    std::string model_type;  // "hy_v3"
    int64_t vocab_size = 0;
    int64_t hidden_size = 0;
    int64_t intermediate_size = 0;      // width of a dense layer's SwiGLU
    int64_t moe_intermediate_size = 0;  // width of one expert (expert_hidden_dim, when given, is equal)
    int64_t num_layers = 0;             // without the MTP layer
    int64_t num_heads = 0;              // query heads
    int64_t num_kv_heads = 0;
    int64_t head_dim = 0;
    int64_t num_experts = 0;
    int64_t num_experts_per_token = 0;
    int64_t num_shared_experts = 0;  // the shared MLP is this many times moe_intermediate_size wide
    int64_t first_k_dense = 0;       // layers [0, first_k_dense) are dense, the others MoE
    int64_t num_mtp_layers = 0;      // 0 or 1; stored as layer num_layers
    int64_t max_position_embeddings = 0;
    double rms_norm_eps = 0;
    double rope_theta = 0;
    double router_scaling_factor = 1;
    bool qk_norm = true;
    bool route_norm = true;  // renormalise the chosen weights
    bool router_sigmoid = true;
    bool router_expert_bias = true;  // a bias added for choosing only
    bool moe_fp32_combine = false;
    bool lm_head_fp32 = true;
    bool tie_word_embeddings = false;
    TokenId bos_token_id = -1;
    TokenId pad_token_id = -1;
    std::vector<TokenId> eos_token_ids;  // config.json's, and generation_config.json's when there

    bool is_moe(int64_t layer) const { return layer >= first_k_dense; }
    int64_t group_size() const { return num_heads / num_kv_heads; }
    int64_t q_width() const { return num_heads * head_dim; }
    int64_t kv_width() const { return num_kv_heads * head_dim; }
    int64_t shared_width() const { return moe_intermediate_size * num_shared_experts; }
};

// generation_config.json: the sampling defaults of the checkpoint's authors. Absent fields stay at the
// neutral value.
struct GenerationDefaults {
    double temperature = 1.0;
    double top_p = 1.0;
    int32_t top_k = 0;  // 0 = off
    double min_p = 0.0;
    double repetition_penalty = 1.0;
};

}  // namespace tessera

// router_topk: which experts a token goes to, and with what weights, from the router's float32 logits.
//
// s = sigmoid(logit). The k experts with the largest s + bias are chosen (ties: the lower index); the bias
// has no part in the weights: w = s, or with `normalise` w = s / (sum of the chosen s + 1e-20), times
// `scale`. The sum runs in ascending order of the experts.
#pragma once

#include <cstdint>

#include "ops/op_context.h"

namespace tessera {

inline constexpr int64_t kRouterExpertsMax = 1024;

struct RouterTopkArgs {
    const float* logits = nullptr;  // [tokens, experts]
    int64_t logits_stride = 0;
    const float* bias = nullptr;  // [experts]; may be null
    int64_t tokens = 0;
    int64_t experts = 0;  // <= kRouterExpertsMax
    int64_t k = 0;        // 1 .. experts
    bool normalise = true;
    float scale = 1.0f;
    int32_t* chosen = nullptr;  // [tokens, k], ascending
    float* weights = nullptr;   // [tokens, k]
};

void router_topk(const OpContext& context, const RouterTopkArgs& args);
void router_topk_ref(const RouterTopkArgs& args);

}  // namespace tessera

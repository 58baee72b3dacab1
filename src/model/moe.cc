#include "model/moe.h"

#include "ops/linear/linear.h"
#include "ops/router_topk/router_topk.h"

namespace tessera {
namespace {

void route(Step& step, const PackedLayer& layer) {
    const ModelConfig& config = step.config;
    Workspace& work = step.work;
    linear(step.ops, {.x = work.normed,
                      .x_stride = config.hidden_size,
                      .rows = step.tokens,
                      .weight = &layer.router,
                      .y = work.router_logits,
                      .y_stride = config.num_experts,
                      .outputs = config.num_experts});
    router_topk(step.ops, {.logits = work.router_logits,
                           .logits_stride = config.num_experts,
                           .bias = layer.expert_bias,
                           .tokens = step.tokens,
                           .experts = config.num_experts,
                           .k = config.num_experts_per_token,
                           .normalise = config.route_norm,
                           .scale = static_cast<float>(config.router_scaling_factor),
                           .chosen = work.chosen.data(),
                           .weights = work.expert_weights});
}

// moe() has left the SwiGLU outputs in its workspace.
void observe(const Step& step, const PackedLayer& layer, const MoeArgs& args) {
    LayerMagnitudes& observed = *step.observed;
    observed.mlp_input.add(args.x, args.tokens * args.hidden);
    const float* hidden = args.workspace->hidden();
    if (layer.is_moe) {
        const int64_t floats = args.tokens * args.k * args.experts[0].padded_width();
        observed.expert_down_input.add(hidden, floats);
        hidden += floats;
    }
    if (args.shared != nullptr) {
        observed.shared_down_input.add(hidden, args.tokens * args.shared->padded_width());
    }
}

}  // namespace

void feed_forward(Step& step, const PackedLayer& layer) {
    Workspace& work = step.work;
    MoeArgs args{.x = work.normed,
                 .x_stride = step.config.hidden_size,
                 .tokens = step.tokens,
                 .hidden = step.config.hidden_size,
                 .y = work.residual,
                 .y_stride = step.config.hidden_size,
                 .workspace = &work.moe};
    if (layer.shared.down.outputs > 0) {
        args.shared = &layer.shared;
    }
    if (layer.is_moe) {
        route(step, layer);
        args.experts = layer.experts;
        args.k = step.config.num_experts_per_token;
        args.chosen = work.chosen.data();
        args.weights = work.expert_weights;
    }
    moe(step.ops, args);
    if (step.observed != nullptr) {
        observe(step, layer, args);
    }
}

}  // namespace tessera

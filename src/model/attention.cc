#include "model/attention.h"

#include <cmath>

#include "ops/linear/linear.h"

namespace tessera {
namespace {

// With fewer rows the projection waits for memory itself.
constexpr int64_t kAheadTokensMin = 7;

// K as it lies in the pages, V as it was stored there (float32 in both cases).
void observe_kv(const Step& step, int64_t kv_layer) {
    const ModelConfig& config = step.config;
    const int64_t width = config.q_width() + 2 * config.kv_width();
    for (int64_t t = 0; t < step.tokens; ++t) {
        const KvTarget& target = step.work.targets[static_cast<size_t>(t)];
        const auto* keys = reinterpret_cast<const float*>(target.page + step.format.k_offset(kv_layer));
        for (int64_t head = 0; head < config.num_kv_heads; ++head) {
            step.observed->key.add(keys + (head * kPageTokens + target.slot) * config.head_dim,
                                   config.head_dim);
        }
        step.observed->value.add(step.work.qkv + t * width + config.q_width() + config.kv_width(),
                                 config.kv_width());
    }
}

}  // namespace

void self_attention(Step& step, const PackedLayer& layer, int64_t kv_layer) {
    const ModelConfig& config = step.config;
    Workspace& work = step.work;
    const int64_t width = config.q_width() + 2 * config.kv_width();
    if (step.observed != nullptr) {
        step.observed->attention_input.add(work.normed, step.tokens * config.hidden_size);
    }
    const AttentionArgs attend{.plan = &work.plan,
                               .q = work.qkv,
                               .q_stride = width,
                               .out = work.attention,
                               .out_stride = config.q_width(),
                               .pool = step.pool.data,
                               .page_stride = step.pool.stride_bytes,
                               .k_offset = step.format.k_offset(kv_layer),
                               .v_offset = step.format.v_offset(kv_layer),
                               .kv_dtype = step.format.kv_dtype,
                               .scale = 1.0f / std::sqrt(static_cast<float>(config.head_dim))};
    const bool ahead = step.tokens >= kAheadTokensMin;
    if (ahead) {
        attention_keys_ahead(step.ops, attend, work.ahead);
    }
    linear(step.ops, {.x = work.normed,
                      .x_stride = config.hidden_size,
                      .rows = step.tokens,
                      .weight = &layer.qkv,
                      .y = work.qkv,
                      .y_stride = width,
                      .outputs = width,
                      .ahead = ahead ? &work.ahead : nullptr});
    qkv_post(step.ops, {.tokens = step.tokens,
                        .q_heads = config.num_heads,
                        .kv_heads = config.num_kv_heads,
                        .head_dim = config.head_dim,
                        .q = work.qkv,
                        .q_stride = width,
                        .k = work.qkv + config.q_width(),
                        .k_stride = width,
                        .v = work.qkv + config.q_width() + config.kv_width(),
                        .v_stride = width,
                        .q_norm = layer.q_norm,
                        .k_norm = layer.k_norm,
                        .eps = step.eps(),
                        .cos = work.cos,
                        .sin = work.sin,
                        .targets = work.targets.data(),
                        .k_offset = step.format.k_offset(kv_layer),
                        .v_offset = step.format.v_offset(kv_layer),
                        .kv_dtype = step.format.kv_dtype});
    attention(step.ops, attend);
    if (step.observed != nullptr) {
        observe_kv(step, kv_layer);
        step.observed->output_input.add(work.attention, step.tokens * config.q_width());
    }
    linear(step.ops, {.x = work.attention,
                      .x_stride = config.q_width(),
                      .rows = step.tokens,
                      .weight = &layer.o,
                      .y = work.residual,
                      .y_stride = config.hidden_size,
                      .outputs = config.hidden_size,
                      .accumulate = true});
}

}  // namespace tessera

#include "model/block.h"

#include "model/attention.h"
#include "model/moe.h"
#include "ops/rms_norm/rms_norm.h"

namespace tessera {

void norm_rows(Step& step, Rows x, const float* weight, Rows y) {
    rms_norm(step.ops, {.x = x.data,
                        .x_stride = x.stride,
                        .weight = weight,
                        .y = y.data,
                        .y_stride = y.stride,
                        .rows = step.tokens,
                        .width = step.config.hidden_size,
                        .eps = step.eps()});
}

void decoder_block(Step& step, const PackedLayer& layer, int64_t kv_layer) {
    const int64_t hidden = step.config.hidden_size;
    const Rows residual{step.work.residual, hidden};
    const Rows normed{step.work.normed, hidden};
    norm_rows(step, residual, layer.input_norm, normed);
    self_attention(step, layer, kv_layer);
    norm_rows(step, residual, layer.post_attention_norm, normed);
    feed_forward(step, layer);
}

}  // namespace tessera

#include "model/mtp.h"

#include "model/block.h"
#include "ops/embed/embed.h"
#include "ops/linear/linear.h"
#include "ops/rms_norm/rms_norm.h"

namespace tessera {

void mtp_input(Step& step, const PackedModel& model, const float* hidden,
               std::span<const TokenId> next_tokens) {
    const int64_t width = step.config.hidden_size;
    float* pair = step.work.pair;  // embedding half first
    embed(step.ops, {.table = model.embedding,
                     .dtype = model.embedding_dtype,
                     .width = width,
                     .tokens = next_tokens.data(),
                     .rows = step.tokens,
                     .y = pair,
                     .y_stride = 2 * width});
    norm_rows(step, {pair, 2 * width}, model.mtp.embedding_norm, {pair, 2 * width});
    rms_norm(step.ops, {.x = hidden,
                        .x_stride = width,
                        .weight = model.mtp.hidden_norm,
                        .y = pair + width,
                        .y_stride = 2 * width,
                        .rows = step.tokens,
                        .width = width,
                        .eps = step.eps()});
    linear(step.ops, {.x = pair,
                      .x_stride = 2 * width,
                      .rows = step.tokens,
                      .weight = &model.mtp.projection,
                      .y = step.work.residual,
                      .y_stride = width,
                      .outputs = width});
}

}  // namespace tessera

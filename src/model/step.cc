#include "model/step.h"

#include <algorithm>
#include <fmt/format.h>

#include "base/check.h"

namespace tessera {
namespace {

MoeShape moe_shape(const ModelConfig& config, const ModelOptions& options) {
    MoeShape shape;
    shape.tokens_max = options.tokens_max;
    shape.shared_width = config.shared_width();
    if (config.first_k_dense > 0) {
        shape.shared_width = std::max(shape.shared_width, config.intermediate_size);
    }
    shape.experts = config.num_experts;
    shape.k = config.num_experts_per_token;
    shape.width = config.moe_intermediate_size;
    return shape;
}

}  // namespace

Result<Workspace> Workspace::create(const ModelConfig& config, const ModelOptions& options, int threads) {
    Result<MoeWorkspace> experts = MoeWorkspace::create(moe_shape(config, options));
    if (!experts.ok()) {
        return experts.status();
    }
    Workspace work(experts.take());
    if (Status status = work.plan.reserve({config.num_heads, config.num_kv_heads, config.head_dim}, threads);
        !status.ok()) {
        return status;
    }
    const int64_t tokens = options.tokens_max;
    int64_t floats = 0;
    const auto reserve = [&](int64_t width) {
        const int64_t offset = floats;
        floats += (tokens * width + 15) / 16 * 16;
        return offset;
    };
    const int64_t residual_at = reserve(config.hidden_size);
    const int64_t normed_at = reserve(config.hidden_size);
    const int64_t pair_at = reserve(config.num_mtp_layers > 0 ? 2 * config.hidden_size : 0);
    const int64_t qkv_at = reserve(config.q_width() + 2 * config.kv_width());
    const int64_t attention_at = reserve(config.q_width());
    const int64_t router_at = reserve(config.num_experts);
    const int64_t weights_at = reserve(config.num_experts_per_token);
    const int64_t cos_at = reserve(config.head_dim / 2);
    const int64_t sin_at = reserve(config.head_dim / 2);
    Result<HostBuffer> memory = HostBuffer::allocate(
        floats * 4, fmt::format("the workspaces of {} tokens", tokens), "lower --max-num-batched-tokens");
    if (!memory.ok()) {
        return memory.status();
    }
    work.memory = memory.take();
    float* base = work.memory.as<float>();
    work.residual = base + residual_at;
    work.normed = base + normed_at;
    work.pair = base + pair_at;
    work.qkv = base + qkv_at;
    work.attention = base + attention_at;
    work.router_logits = base + router_at;
    work.expert_weights = base + weights_at;
    work.cos = base + cos_at;
    work.sin = base + sin_at;
    work.chosen.resize(static_cast<size_t>(tokens * config.num_experts_per_token));
    work.positions.resize(static_cast<size_t>(tokens));
    work.targets.resize(static_cast<size_t>(tokens));
    work.sequences.reserve(static_cast<size_t>(tokens));
    return work;
}

void prepare_step(Step& step, std::span<const SequenceSpan> sequences, int32_t first_slot) {
    Workspace& work = step.work;
    work.sequences.clear();
    int32_t row = 0;
    for (const SequenceSpan& sequence : sequences) {
        check(sequence.first == row && sequence.q_len >= 1 && row + sequence.q_len <= step.tokens,
              "forward: the sequences do not cover the batch in order");
        const int64_t last_slot = int64_t{sequence.position} + sequence.q_len - 1 + first_slot;
        check(last_slot / kPageTokens < static_cast<int64_t>(sequence.pages.size()),
              "forward: a sequence has too few pages");
        for (int32_t i = 0; i < sequence.q_len; ++i) {
            const int64_t slot = int64_t{sequence.position} + i + first_slot;
            const PageId page = sequence.pages[static_cast<size_t>(slot / kPageTokens)];
            const auto at = static_cast<size_t>(row + i);
            work.positions[at] = sequence.position + i;
            work.targets[at] = {step.pool.data + page * step.pool.stride_bytes,
                                static_cast<int32_t>(slot % kPageTokens)};
        }
        work.sequences.push_back({row, sequence.q_len, sequence.position, first_slot, sequence.pages});
        row += sequence.q_len;
    }
    check(row == step.tokens, "forward: the sequences do not cover the batch");
    rope_angles(step.ops, {.positions = work.positions.data(),
                           .tokens = step.tokens,
                           .head_dim = step.config.head_dim,
                           .theta = step.config.rope_theta,
                           .cos = work.cos,
                           .sin = work.sin});
    work.plan.build({step.config.num_heads, step.config.num_kv_heads, step.config.head_dim}, work.sequences,
                    step.ops.threads.size());
}

}  // namespace tessera

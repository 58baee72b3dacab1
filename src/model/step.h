// What the modules of one forward pass share: the step's inputs in the kernels' form, and the workspaces.
#pragma once

#include <utility>
#include <vector>

#include "base/status.h"
#include "device/host_buffer.h"
#include "model/hy3_model.h"
#include "ops/attention/attention.h"
#include "ops/moe/moe.h"
#include "ops/op_context.h"
#include "ops/qkv_post/qkv_post.h"

namespace tessera {

// Allocated once for tokens_max rows; every pass writes what it reads.
struct Workspace {
    static Result<Workspace> create(const ModelConfig& config, const ModelOptions& options, int threads);

    HostBuffer memory;
    float* residual = nullptr;        // [T, hidden]
    float* normed = nullptr;          // [T, hidden]
    float* pair = nullptr;            // [T, 2 hidden]: the MTP projection's input; null without the layer
    float* qkv = nullptr;             // [T, q_width + 2 kv_width]
    float* attention = nullptr;       // [T, q_width]
    float* router_logits = nullptr;   // [T, experts]
    float* expert_weights = nullptr;  // [T, k]
    float* cos = nullptr;             // [T, head_dim / 2]
    float* sin = nullptr;
    std::vector<int32_t> chosen;  // [T, k]
    std::vector<int32_t> positions;
    std::vector<KvTarget> targets;
    std::vector<AttentionSequence> sequences;
    AttentionPlan plan;
    FetchAhead ahead;
    MoeWorkspace moe;

  private:
    explicit Workspace(MoeWorkspace moe_workspace) : moe(std::move(moe_workspace)) {}
};

struct Step {
    const ModelConfig& config;
    const PageFormat& format;
    OpContext ops;
    Workspace& work;
    PagePoolView pool;
    int64_t tokens = 0;
    LayerMagnitudes* observed = nullptr;  // of the layer that runs; null unless the model is observed

    float eps() const { return static_cast<float>(config.rms_norm_eps); }
};

// Fills positions, RoPE tables, KV targets and the attention plan. Entry i of a sequence goes to slot
// position + i + first_slot.
void prepare_step(Step& step, std::span<const SequenceSpan> sequences, int32_t first_slot);

}  // namespace tessera

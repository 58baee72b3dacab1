#include "model/cuda/device_forward.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

#include "base/check.h"
#include "device/cuda/blocking_copy.h"
#include "model/cuda/step_kernels.h"
#include "ops/embed/cuda/embed_cuda.h"
#include "ops/qkv_post/cuda/qkv_post_cuda.h"
#include "ops/rms_norm/cuda/rms_norm_cuda.h"
#include "ops/router_topk/cuda/router_topk_cuda.h"

namespace tessera {
namespace {

PageFormat make_format(const ModelConfig& config, DType kv_dtype) {
    PageFormat format;
    format.layers = config.num_layers + config.num_mtp_layers;
    format.kv_heads = config.num_kv_heads;
    format.head_dim = config.head_dim;
    format.hidden_size = config.hidden_size;
    format.kv_dtype = kv_dtype;
    format.scale_kind = kv_dtype == DType::kFloat8E4M3 ? KvScaleKind::kPerTensor : KvScaleKind::kNone;
    return format;
}

// Parts of one buffer, 256-byte aligned; laid out twice, first without memory.
class Layout {
  public:
    explicit Layout(std::byte* base) : base_(base) {}
    int64_t bytes() const { return bytes_; }
    template <typename T>
    void take(T*& pointer, int64_t count) {
        if (base_ != nullptr) {
            pointer = reinterpret_cast<T*>(base_ + bytes_);
        }
        bytes_ += (count * static_cast<int64_t>(sizeof(T)) + 255) / 256 * 256;
    }

  private:
    std::byte* base_ = nullptr;
    int64_t bytes_ = 0;
};

// Runs `lay` to learn the size, allocates, and runs it again.
template <typename F>
Status allocate_layout(MemoryBudget& budget, std::string_view name, DeviceBuffer& memory, F&& lay) {
    Layout measure(nullptr);
    lay(measure);
    Result<DeviceBuffer> buffer =
        DeviceBuffer::allocate(budget, MemoryCategory::kWorkspace, name, measure.bytes());
    if (!buffer.ok()) {
        return buffer.status();
    }
    memory = buffer.take();
    Layout layout(memory.data());
    lay(layout);
    return {};
}

}  // namespace

DeviceForward::DeviceForward(Key, const ModelConfig& config, DeviceWeights weights,
                             const DeviceForwardOptions& options, const DeviceProps& device)
    : config_(config),
      options_(options),
      device_(device),
      weights_(std::move(weights)),
      format_(make_format(config, options.kv_dtype)),
      // The MTP entry of a position lies one slot further on.
      pages_max_(static_cast<int32_t>(options.positions_max / kPageTokens + 1)),
      shape_{static_cast<int32_t>(config.num_heads), static_cast<int32_t>(config.num_kv_heads)} {}

Result<std::unique_ptr<DeviceForward>> DeviceForward::create(const ModelConfig& config, DeviceWeights weights,
                                                             const DeviceForwardOptions& options,
                                                             const DeviceProps& device,
                                                             MemoryBudget& budget) {
    auto out = std::make_unique<DeviceForward>(Key(), config, std::move(weights), options, device);
    if (Status status = out->allocate(budget); !status.ok()) {
        return status;
    }
    if (Status status = out->upload_rope(budget); !status.ok()) {
        return status;
    }
    return out;
}

Status DeviceForward::allocate(MemoryBudget& budget) {
    const int64_t tokens = options_.tokens_max;
    const int64_t router_bytes = router_cuda_workspace_bytes(config_.num_experts, config_.hidden_size);
    Status status = allocate_layout(budget, "activations", activations_memory_, [&](Layout& layout) {
        layout.take(residual_, tokens * config_.hidden_size);
        layout.take(normed_, tokens * config_.hidden_size);
        layout.take(normed8_, tokens * config_.hidden_size);
        layout.take(qkv_, tokens * qkv_width());
        layout.take(attention_, tokens * config_.q_width());
        layout.take(attention8_, tokens * config_.q_width());
        layout.take(pair_, config_.num_mtp_layers > 0 ? tokens * 2 * config_.hidden_size : 0);
        layout.take(head_input_, options_.logit_rows_max * config_.hidden_size);
        layout.take(router_logits_, tokens * config_.num_experts);
        layout.take(expert_weights_, tokens * config_.num_experts_per_token);
        layout.take(chosen_, tokens * config_.num_experts_per_token);
        layout.take(router_workspace_, router_bytes);
    });
    if (status.ok() && router_bytes > 0) {
        fill_blocking(router_workspace_, 0xFF, router_bytes);
    }
    if (status.ok()) {
        status = allocate_layout(budget, "logits", logits_memory_, [&](Layout& layout) {
            layout.take(logits_, options_.logit_rows_max * config_.vocab_size);
        });
    }
    if (status.ok()) {
        status = allocate_layout(budget, "attention", attention_memory_, [&](Layout& layout) {
            layout.take(decode_workspace_, decode_cuda_workspace_bytes(decode_plan(DeviceBatch{})));
            layout.take(prefill_workspace_,
                        prefill_cuda_workspace_bytes(shape_, options_.sequences_max, options_.tokens_max));
            layout.take(decode_rows_workspace_,
                        prefill_cuda_workspace_bytes(shape_, options_.sequences_max, options_.sequences_max));
            layout.take(row_numbers_, options_.sequences_max + 1);
        });
    }
    if (status.ok()) {
        std::vector<int32_t> numbers(static_cast<size_t>(options_.sequences_max) + 1);
        std::iota(numbers.begin(), numbers.end(), 0);
        copy_blocking(row_numbers_, numbers.data(), static_cast<int64_t>(numbers.size() * 4));
    }
    int64_t moe_bytes = 0;
    const auto count_layer = [&](const DeviceLayer& layer) {
        const int64_t k = layer.is_moe ? config_.num_experts_per_token : 0;
        moe_bytes = std::max(moe_bytes, moe_cuda_workspace_bytes(layer.mlp.tensors, tokens, k));
    };
    std::for_each(weights_.layers.begin(), weights_.layers.end(), count_layer);
    if (config_.num_mtp_layers > 0) {
        count_layer(weights_.mtp.layer);
    }
    std::byte* unused = nullptr;
    if (status.ok()) {
        status = allocate_layout(budget, "MLP and experts", moe_memory_,
                                 [&](Layout& layout) { layout.take(unused, moe_bytes); });
    }
    if (status.ok()) {
        fill_blocking(moe_memory_.data(), 0xFF, moe_bytes);
        status = allocate_layout(budget, "matrix products", linear_memory_,
                                 [&](Layout& layout) { layout.take(unused, LinearCuda::kWorkspaceBytes); });
    }
    if (status.ok()) {
        linear_ = std::make_unique<LinearCuda>(linear_memory_.data(), LinearCuda::kWorkspaceBytes,
                                               options_.deterministic);
    }
    return status;
}

Status DeviceForward::upload_rope(MemoryBudget& budget) {
    const std::vector<float> table = rope_table(options_.positions_max, config_.head_dim, config_.rope_theta);
    const auto bytes = static_cast<int64_t>(table.size()) * 4;
    Result<DeviceBuffer> buffer =
        DeviceBuffer::allocate(budget, MemoryCategory::kWorkspace, "RoPE angles", bytes);
    if (!buffer.ok()) {
        return buffer.status();
    }
    rope_memory_ = buffer.take();
    copy_blocking(rope_memory_.data(), table.data(), bytes);
    return {};
}

void DeviceForward::forward(cudaStream_t stream, const DeviceBatch& batch) {
    plan_attention(stream, batch, 0);
    embed(stream, batch);
    for (size_t i = 0; i < weights_.layers.size(); ++i) {
        const ProfileRange range("layer");
        block(stream, batch, weights_.layers[i], static_cast<int64_t>(i));
    }
    finish(stream, batch, weights_.final_norm);
    const PassSection section = this->section(stream, PassOperator::kPrepare);
    write_trailers_cuda(stream, {.hidden = normed_,
                                 .tokens = batch.tokens_count,
                                 .width = config_.hidden_size,
                                 .positions = batch.positions,
                                 .sequences = batch.sequences,
                                 .page_tables = batch.page_tables,
                                 .pages_max = pages_max_,
                                 .pool = batch.pool,
                                 .page_stride = format_.page_bytes(),
                                 .trailer_offset = format_.trailer_offset()});
}

void DeviceForward::embed(cudaStream_t stream, const DeviceBatch& batch) {
    const PassSection section = this->section(stream, PassOperator::kEmbed);
    embed_cuda(stream, {.table = weights_.embedding,
                        .vocab = config_.vocab_size,
                        .width = config_.hidden_size,
                        .tokens = batch.tokens,
                        .rows = batch.tokens_count,
                        .y = residual_,
                        .y_stride = config_.hidden_size});
}

void DeviceForward::mtp_forward(cudaStream_t stream, const DeviceBatch& batch, const __nv_bfloat16* hidden) {
    check(config_.num_mtp_layers == 1 && batch.decode_rows == 0, "mtp_forward: no MTP layer, or decode rows");
    const int64_t width = config_.hidden_size;
    plan_attention(stream, batch, 1);
    embed(stream, batch);
    RmsNormCudaArgs args{.x = residual_,
                         .x_stride = width,
                         .weight = weights_.mtp.embedding_norm,
                         .y = pair_,  // embedding half first
                         .y_stride = 2 * width,
                         .rows = batch.tokens_count,
                         .width = width,
                         .eps = eps()};
    rms_norm_cuda(stream, args);
    args.x = const_cast<__nv_bfloat16*>(hidden);  // not written without `add`
    args.weight = weights_.mtp.hidden_norm;
    args.y = pair_ + width;
    rms_norm_cuda(stream, args);
    project(stream, weights_.mtp.projection, {.x = pair_, .y = residual_, .rows = batch.tokens_count});
    block(stream, batch, weights_.mtp.layer, config_.num_layers);
    finish(stream, batch, weights_.mtp.final_norm);
}

DecodePlanCudaArgs DeviceForward::decode_plan(const DeviceBatch& batch) const {
    return {.shape = shape_,
            .positions = batch.first_positions,
            .batch = batch.decode_rows,
            .q_len = 1,
            .first_slot = first_slot_,
            .slots_max = options_.positions_max,
            .sm_count = device_.sm_count,
            .workspace = decode_workspace_};
}

PrefillPlanCudaArgs DeviceForward::prefill_plan(const DeviceBatch& batch) const {
    return {.first_rows = batch.prefill_first_rows,
            .positions = batch.first_positions + batch.decode_rows,
            .first_slot = first_slot_,
            .sequences = batch.prefill_rows,
            .rows_max = batch.tokens_count - batch.decode_rows,
            .shape = shape_,
            .workspace = prefill_workspace_};
}

PrefillPlanCudaArgs DeviceForward::decode_rows_plan(const DeviceBatch& batch) const {
    return {.first_rows = row_numbers_,
            .positions = batch.first_positions,
            .first_slot = first_slot_,
            .sequences = batch.decode_rows,
            .rows_max = batch.decode_rows,
            .shape = shape_,
            .workspace = decode_rows_workspace_};
}

void DeviceForward::plan_attention(cudaStream_t stream, const DeviceBatch& batch, int32_t first_slot) {
    check(batch.tokens_count >= 1 && batch.tokens_count <= options_.tokens_max &&
              batch.decode_rows + batch.prefill_rows <= options_.sequences_max &&
              batch.logit_count <= options_.logit_rows_max,
          "forward: the batch exceeds the workspaces");
    first_slot_ = first_slot;
    const PassSection section = this->section(stream, PassOperator::kPrepare);
    if (batch.decode_rows > 0 && options_.deterministic) {
        prefill_plan_cuda(stream, decode_rows_plan(batch));
    } else if (batch.decode_rows > 0) {
        decode_plan_cuda(stream, decode_plan(batch));
    }
    if (batch.prefill_rows > 0) {
        prefill_plan_cuda(stream, prefill_plan(batch));
    }
}

void DeviceForward::block(cudaStream_t stream, const DeviceBatch& batch, const DeviceLayer& layer,
                          int64_t kv_layer) {
    const bool fp8 = layer.qkv.dtype == DType::kFloat8E4M3;
    norm(stream, batch, {.weight = layer.input_norm, .y = fp8 ? nullptr : normed_, .next = &layer.qkv});
    {
        const PassSection section = this->section(stream, PassOperator::kQkv);
        project(
            stream, layer.qkv,
            {.x = fp8 ? static_cast<const void*>(normed8_) : normed_, .y = qkv_, .rows = batch.tokens_count});
    }
    qkv_post(stream, batch, layer, kv_layer);
    attend(stream, batch, layer, kv_layer);
    attention_out(stream, batch, layer);
    feed_forward(stream, batch, layer);
}

// Whether decode attention itself writes what an e4m3 o projection reads.
bool DeviceForward::decode_quantises(const DeviceLayer& layer) const {
    return layer.o.dtype == DType::kFloat8E4M3 && !options_.deterministic &&
           config_.group_size() <= kDecodeCudaRowsOfE4m3;
}

void DeviceForward::attention_out(cudaStream_t stream, const DeviceBatch& batch, const DeviceLayer& layer) {
    const PassSection section = this->section(stream, PassOperator::kAttentionOut);
    const int64_t rows = batch.tokens_count;
    const bool fp8 = layer.o.dtype == DType::kFloat8E4M3;
    const int64_t quantised = decode_quantises(layer) ? batch.decode_rows : 0;
    if (fp8 && rows > quantised) {
        const int64_t first = quantised * config_.q_width();
        quantize_cuda(stream, {.x = attention_ + first,
                               .count = rows * config_.q_width() - first,
                               .scale = layer.o.input_scale,
                               .y = attention8_ + first});
    }
    project(stream, layer.o,
            {.x = fp8 ? static_cast<const void*>(attention8_) : attention_,
             .y = residual_,
             .rows = rows,
             .accumulate = true});
}

void DeviceForward::qkv_post(cudaStream_t stream, const DeviceBatch& batch, const DeviceLayer& layer,
                             int64_t kv_layer) {
    const PassSection section = this->section(stream, PassOperator::kQkvPost);
    const int64_t width = qkv_width();
    __nv_bfloat16* k = qkv_ + config_.q_width();
    qkv_post_cuda(stream, {.tokens = batch.tokens_count,
                           .q_heads = config_.num_heads,
                           .kv_heads = config_.num_kv_heads,
                           .head_dim = config_.head_dim,
                           .q = qkv_,
                           .k = k,
                           .v = k + config_.kv_width(),
                           .q_stride = width,
                           .kv_stride = width,
                           .q_out = qkv_,
                           .q_out_stride = width,
                           .q_norm = layer.q_norm,
                           .k_norm = layer.k_norm,
                           .eps = eps(),
                           .rope = rope_memory_.as<float>(),
                           .positions = batch.positions,
                           .slot_shift = first_slot_,
                           .sequences = batch.sequences,
                           .page_table = batch.page_tables,
                           .page_table_stride = pages_max_,
                           .pages = batch.pool,
                           .page_stride = format_.page_bytes(),
                           .k_offset = format_.k_offset(kv_layer),
                           .v_offset = format_.v_offset(kv_layer),
                           .kv_dtype = format_.kv_dtype,
                           .k_scale = layer.k_scale,
                           .v_scale = layer.v_scale,
                           .batch_invariant = options_.deterministic});
}

void DeviceForward::attend(cudaStream_t stream, const DeviceBatch& batch, const DeviceLayer& layer,
                           int64_t kv_layer) {
    const PassSection section = this->section(stream, PassOperator::kAttention);
    const float scale = 1.0f / std::sqrt(static_cast<float>(config_.head_dim));
    const bool fp8 = format_.kv_dtype == DType::kFloat8E4M3;
    const PagedKvCuda kv{
        .pool = batch.pool,
        .page_stride = format_.page_bytes(),
        .k_offset = format_.k_offset(kv_layer),
        .v_offset = format_.v_offset(kv_layer),
        .dtype = format_.kv_dtype,
        .k_scale = fp8 ? layer.k_scale : 1.0f,  // a checkpoint's scales are those of e4m3 pages alone
        .v_scale = fp8 ? layer.v_scale : 1.0f,
        .page_tables = batch.page_tables,
        .pages_max = pages_max_};
    // settled: plans and tables are of this step's begin and all other slots of earlier steps; the kernel
    // before, qkv_post or decode attention, waits for its own predecessor before it lets another start.
    PrefillCudaArgs prefill{.plan = decode_rows_plan(batch),
                            .kv = kv,
                            .q = qkv_,
                            .q_stride = qkv_width(),
                            .out = attention_,
                            .out_stride = config_.q_width(),
                            .scale = scale,
                            .sm_count = device_.sm_count,
                            .settled = true};
    if (batch.decode_rows > 0 && options_.deterministic) {
        attention_prefill_cuda(stream, prefill);
    } else if (batch.decode_rows > 0) {
        attention_decode_cuda(stream, {.plan = decode_plan(batch),
                                       .kv = kv,
                                       .q = qkv_,
                                       .q_stride = qkv_width(),
                                       .out = attention_,
                                       .out_stride = config_.q_width(),
                                       .out8 = decode_quantises(layer) ? attention8_ : nullptr,
                                       .out8_scale = layer.o.input_scale,
                                       .scale = scale,
                                       .settled = true});
    }
    if (batch.prefill_rows > 0) {
        prefill.plan = prefill_plan(batch);
        prefill.kv.page_tables += static_cast<int64_t>(batch.decode_rows) * pages_max_;
        prefill.q = qkv_ + batch.decode_rows * qkv_width();
        prefill.out = attention_ + batch.decode_rows * config_.q_width();
        attention_prefill_cuda(stream, prefill);
    }
}

void DeviceForward::route(cudaStream_t stream, const DeviceBatch& batch, const DeviceLayer& layer) {
    {
        const PassSection section = this->section(stream, PassOperator::kRouter);
        router_cuda(stream,
                    {.x = normed_,
                     .x_stride = config_.hidden_size,
                     .high = layer.router_high,
                     .low = layer.router_low,
                     .tokens = batch.tokens_count,
                     .experts = config_.num_experts,
                     .width = config_.hidden_size,
                     .logits = router_logits_,
                     .logits_stride = config_.num_experts,
                     .workspace = router_workspace_,
                     .deterministic = options_.deterministic,
                     .sm_count = device_.sm_count},
                    {.bias = layer.expert_bias,
                     .positions = batch.positions,
                     .tokens = batch.tokens_count,
                     .experts = config_.num_experts,
                     .k = config_.num_experts_per_token,
                     .normalise = config_.route_norm,
                     .scale = static_cast<float>(config_.router_scaling_factor),
                     .chosen = chosen_,
                     .weights = expert_weights_});
    }
    if (observer_ != nullptr) {
        observer_->experts_chosen(stream, chosen_, batch.tokens_count * config_.num_experts_per_token);
    }
}

void DeviceForward::feed_forward(cudaStream_t stream, const DeviceBatch& batch, const DeviceLayer& layer) {
    const MoeCudaTensors& tensors = layer.mlp.tensors;
    const bool fp8 = tensors.dtype == DType::kFloat8E4M3 && !tensors.grouped();
    const DeviceMatrix input{.dtype = fp8 ? tensors.dtype : DType::kBFloat16,
                             .input_scale = layer.is_moe ? tensors.input_scale : tensors.shared_input_scale};
    const bool dense8 = fp8 && !layer.is_moe;  // the router alone reads bfloat16 then
    norm(stream, batch,
         {.weight = layer.post_attention_norm, .y = dense8 ? nullptr : normed_, .next = &input});
    MoeCudaArgs args{.weights = &layer.mlp,
                     .x = normed_,
                     .x8 = fp8 ? normed8_ : nullptr,
                     .tokens = batch.tokens_count,
                     .y = residual_,
                     .workspace = moe_memory_.data(),
                     .sm_count = device_.sm_count,
                     .batch_invariant = options_.deterministic};
    if (layer.is_moe) {
        route(stream, batch, layer);
        args.k = config_.num_experts_per_token;
        args.chosen = chosen_;
        args.expert_weights = expert_weights_;
    }
    const PassSection section =
        this->section(stream, layer.is_moe ? PassOperator::kExperts : PassOperator::kDenseMlp);
    moe_cuda(stream, args);
}

// y = x W^T; the caller has quantised x where the matrix is e4m3.
void DeviceForward::project(cudaStream_t stream, const DeviceMatrix& matrix, LinearCudaArgs args) {
    args.weight = matrix.data;
    args.inputs = matrix.inputs;
    args.outputs = matrix.outputs;
    args.dtype = matrix.dtype;
    if (matrix.column_scale != nullptr) {
        args.column_scale = matrix.column_scale;
        args.row_scale = matrix.row_scale;
    } else {
        args.scale = matrix.input_scale * matrix.weight_scale;
    }
    linear_->run(stream, args);
}

// y = RMSNorm(residual) and, where the matrix that takes it is e4m3, normed8.
void DeviceForward::norm(cudaStream_t stream, const DeviceBatch& batch, const Norm& args) {
    const PassSection section = this->section(stream, PassOperator::kNorm);
    const bool fp8 = args.next != nullptr && args.next->dtype == DType::kFloat8E4M3;
    rms_norm_cuda(stream, {.x = residual_,
                           .x_stride = config_.hidden_size,
                           .weight = args.weight,
                           .y = args.y,
                           .y_stride = config_.hidden_size,
                           .y8 = fp8 ? normed8_ : nullptr,
                           .y8_stride = config_.hidden_size,
                           .y8_scale = fp8 ? args.next->input_scale : 1.0f,
                           .rows = batch.tokens_count,
                           .width = config_.hidden_size,
                           .eps = eps()});
}

void DeviceForward::finish(cudaStream_t stream, const DeviceBatch& batch, const __nv_bfloat16* norm_weight) {
    norm(stream, batch, {.weight = norm_weight, .y = normed_});
    if (batch.logit_count == 0) {
        return;
    }
    const PassSection section = this->section(stream, PassOperator::kHead);
    const __nv_bfloat16* input = normed_;
    if (batch.logit_rows != nullptr) {
        rms_norm_cuda(stream, {.x = residual_,
                               .x_stride = config_.hidden_size,
                               .x_rows = batch.logit_rows,
                               .weight = norm_weight,
                               .y = head_input_,
                               .y_stride = config_.hidden_size,
                               .rows = batch.logit_count,
                               .width = config_.hidden_size,
                               .eps = eps()});
        input = head_input_;
    }
    project(stream, weights_.lm_head,
            {.x = input, .y = logits_, .rows = batch.logit_count, .y_dtype = DType::kFloat32});
}

}  // namespace tessera

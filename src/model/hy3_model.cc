#include "model/hy3_model.h"

#include <algorithm>
#include <cstring>
#include <fmt/format.h>

#include "base/check.h"
#include "model/block.h"
#include "model/mtp.h"
#include "model/packed_weights.h"
#include "model/step.h"
#include "ops/embed/embed.h"
#include "ops/linear/linear.h"
#include "ops/router_topk/router_topk.h"

namespace tessera {
namespace {

Status refuse(std::string_view field, auto value, std::string_view needed) {
    return unimplemented(fmt::format("{} is {}; {}", field, value, needed));
}

// What the kernels cannot compute. The loader has checked that config and weights agree.
Status supported(const ModelConfig& config, const ModelOptions& options) {
    if (config.head_dim % 16 != 0 || config.head_dim < 16 || config.head_dim > 512) {
        return refuse("head_dim", config.head_dim, "it must be a multiple of 16, at most 512");
    }
    if (config.num_kv_heads < 1 || config.num_heads % config.num_kv_heads != 0) {
        return refuse("num_attention_heads", config.num_heads,
                      fmt::format("it must be a multiple of num_key_value_heads ({})", config.num_kv_heads));
    }
    if (!config.router_sigmoid && config.first_k_dense < config.num_layers) {
        return refuse("moe_router_use_sigmoid", false, "only sigmoid routing is supported");
    }
    if (config.num_experts > kRouterExpertsMax) {
        return refuse("num_experts", config.num_experts,
                      fmt::format("at most {} are supported", kRouterExpertsMax));
    }
    if (config.num_experts_per_token > config.num_experts) {
        return refuse("num_experts_per_tok", config.num_experts_per_token,
                      fmt::format("there are only {} experts", config.num_experts));
    }
    if (options.kv_dtype != DType::kFloat32 && options.kv_dtype != DType::kBFloat16) {
        return refuse("the KV cache's dtype", dtype_name(options.kv_dtype),
                      "the CPU keeps float32 or bfloat16");
    }
    if (options.observer != nullptr && options.kv_dtype != DType::kFloat32) {
        return refuse("the KV cache's dtype", dtype_name(options.kv_dtype), "calibration needs float32");
    }
    if (options.tokens_max < 1) {
        return refuse("the largest batch", options.tokens_max, "it must be at least 1 token");
    }
    return {};
}

PageFormat make_format(const ModelConfig& config, const ModelOptions& options) {
    PageFormat format;
    format.layers = config.num_layers + config.num_mtp_layers;
    format.kv_heads = config.num_kv_heads;
    format.head_dim = config.head_dim;
    format.hidden_size = config.hidden_size;
    format.kv_dtype = options.kv_dtype;
    return format;
}

class HostPool final : public PagePool {
  public:
    HostPool(HostBuffer memory, int64_t stride) : memory_(std::move(memory)), stride_(stride) {}
    PagePoolView view() const override { return {memory_.data(), stride_}; }

  private:
    HostBuffer memory_;
    int64_t stride_ = 0;
};

class CpuModel final : public Hy3Model {
  public:
    CpuModel(const ModelConfig& config, const ModelOptions& options, PackedModel packed, Workspace work,
             ThreadPool& pool)
        : config_(config),
          options_(options),
          format_(make_format(config, options)),
          packed_(std::move(packed)),
          pool_(pool),
          work_(std::move(work)) {
        if (options_.observer != nullptr) {
            options_.observer->layers.assign(static_cast<size_t>(format_.layers), {});
        }
    }

    const ModelConfig& config() const override { return config_; }
    const PageFormat& page_format() const override { return format_; }
    int64_t packed_bytes() const override { return packed_.arena.bytes(); }

    Result<std::unique_ptr<PagePool>> make_pool(int64_t pages) override {
        Result<HostBuffer> memory =
            HostBuffer::allocate(pages * format_.page_bytes(), fmt::format("the KV cache of {} pages", pages),
                                 "shorter or fewer sequences need less");
        if (!memory.ok()) {
            return memory.status();
        }
        return std::unique_ptr<PagePool>(std::make_unique<HostPool>(memory.take(), format_.page_bytes()));
    }

    void forward(const ForwardBatch& batch, const ForwardOutput& output, ForwardTrace* trace) override {
        Step step = begin(static_cast<int64_t>(batch.tokens.size()), batch.pool);
        prepare_step(step, batch.sequences, 0);
        embed(step.ops, {.table = packed_.embedding,
                         .dtype = packed_.embedding_dtype,
                         .width = config_.hidden_size,
                         .tokens = batch.tokens.data(),
                         .rows = step.tokens,
                         .y = work_.residual,
                         .y_stride = config_.hidden_size});
        start_trace(step, trace);
        for (size_t i = 0; i < packed_.layers.size(); ++i) {
            run_block(step, packed_.layers[i], static_cast<int64_t>(i));
            trace_layer(step, i, trace);
        }
        finish(step, packed_.final_norm, batch.logit_rows, output);
        write_trailers(step, batch.sequences);
        if (trace != nullptr) {
            trace->hidden.push_back(copy_rows(step, work_.normed, config_.hidden_size));
        }
    }

    void mtp_forward(const MtpBatch& batch, const ForwardOutput& output) override {
        check(config_.num_mtp_layers == 1, "mtp_forward: the model has no MTP layer");
        Step step = begin(static_cast<int64_t>(batch.next_tokens.size()), batch.pool);
        prepare_step(step, batch.sequences, 1);
        mtp_input(step, packed_, batch.hidden, batch.next_tokens);
        run_block(step, packed_.mtp.layer, config_.num_layers);
        finish(step, packed_.mtp.final_norm, batch.logit_rows, output);
    }

  private:
    Step begin(int64_t tokens, PagePoolView pool) {
        check(tokens >= 1 && tokens <= options_.tokens_max, "forward: the batch exceeds tokens_max");
        return {config_, format_, OpContext{pool_}, work_, pool, tokens};
    }

    void run_block(Step& step, const PackedLayer& layer, int64_t kv_layer) const {
        if (options_.observer != nullptr) {
            step.observed = &options_.observer->layers[static_cast<size_t>(kv_layer)];
        }
        decoder_block(step, layer, kv_layer);
    }

    // normed = the final norm of the residual; then the outputs that were asked for.
    void finish(Step& step, const float* norm, std::span<const int32_t> logit_rows,
                const ForwardOutput& output) {
        const int64_t hidden = config_.hidden_size;
        norm_rows(step, {work_.residual, hidden}, norm, {work_.normed, hidden});
        if (output.hidden != nullptr) {
            std::copy_n(work_.normed, step.tokens * hidden, output.hidden);
        }
        if (output.logits != nullptr && !logit_rows.empty()) {
            linear(step.ops, {.x = work_.normed,
                              .x_stride = hidden,
                              .x_rows = logit_rows.data(),
                              .rows = static_cast<int64_t>(logit_rows.size()),
                              .weight = &packed_.lm_head,
                              .y = output.logits,
                              .y_stride = config_.vocab_size,
                              .outputs = config_.vocab_size});
        }
    }

    void write_trailers(const Step& step, std::span<const SequenceSpan> sequences) const {
        for (const SequenceSpan& sequence : sequences) {
            const int32_t end = sequence.position + sequence.q_len;
            constexpr auto kPage = static_cast<int32_t>(kPageTokens);
            for (int32_t last = sequence.position / kPage * kPage + kPage - 1; last < end; last += kPage) {
                const PageId page = sequence.pages[static_cast<size_t>(last / kPage)];
                const float* row =
                    work_.normed + (sequence.first + last - sequence.position) * config_.hidden_size;
                std::memcpy(step.pool.data + page * step.pool.stride_bytes + format_.trailer_offset(), row,
                            static_cast<size_t>(format_.trailer_bytes()));
            }
        }
    }

    static std::vector<float> copy_rows(const Step& step, const float* data, int64_t width) {
        return {data, data + step.tokens * width};
    }

    void start_trace(const Step& step, ForwardTrace* trace) const {
        if (trace != nullptr) {
            trace->hidden.assign(1, copy_rows(step, work_.residual, config_.hidden_size));
            trace->router_logits.clear();
        }
    }

    void trace_layer(const Step& step, size_t layer, ForwardTrace* trace) const {
        if (trace == nullptr) {
            return;
        }
        if (layer + 1 < packed_.layers.size()) {
            trace->hidden.push_back(copy_rows(step, work_.residual, config_.hidden_size));
        }
        trace->router_logits.emplace_back();
        if (packed_.layers[layer].is_moe) {
            trace->router_logits.back() = copy_rows(step, work_.router_logits, config_.num_experts);
        }
    }

    const ModelConfig config_;
    const ModelOptions options_;
    const PageFormat format_;
    const PackedModel packed_;
    ThreadPool& pool_;
    Workspace work_;
};

}  // namespace

Result<std::unique_ptr<Hy3Model>> Hy3Model::create(const ModelConfig& config, const ModelWeights& weights,
                                                   const ModelOptions& options, ThreadPool& pool) {
    if (Status status = supported(config, options); !status.ok()) {
        return status;
    }
    Result<PackedModel> packed = pack_model(config, weights, options, pool);
    if (!packed.ok()) {
        return packed.status();
    }
    Result<Workspace> work = Workspace::create(config, options, pool.size());
    if (!work.ok()) {
        return work.status();
    }
    return std::unique_ptr<Hy3Model>(
        std::make_unique<CpuModel>(config, options, packed.take(), work.take(), pool));
}

}  // namespace tessera

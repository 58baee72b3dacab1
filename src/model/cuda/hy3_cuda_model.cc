#include "model/cuda/hy3_cuda_model.h"

#include <algorithm>
#include <fmt/format.h>
#include <string_view>
#include <vector>

#include "base/check.h"
#include "device/cuda/cuda_check.h"
#include "device/cuda/stream.h"
#include "model/cuda/device_forward.h"
#include "ops/attention/cuda/attention_cuda.h"
#include "ops/common/half.h"
#include "ops/moe/cuda/moe_cuda.h"
#include "ops/router_topk/cuda/router_topk_cuda.h"

namespace tessera {
namespace {

constexpr int32_t kSequencesMax = 1024;

Status refuse(std::string_view field, auto value, std::string_view needed) {
    return unimplemented(fmt::format("{} is {}; the CUDA backend needs {}", field, value, needed));
}

// What the kernels cannot compute. The loader has checked that config and weights agree.
Status supported(const ModelConfig& config, const CudaModelOptions& options) {
    if (config.head_dim != 128) {
        return refuse("head_dim", config.head_dim, "128");
    }
    if (config.num_kv_heads < 1 || config.num_heads % config.num_kv_heads != 0 ||
        config.num_heads < config.num_kv_heads ||
        config.num_heads > kAttentionCudaGroupMax * config.num_kv_heads) {
        return refuse("num_attention_heads", config.num_heads,
                      fmt::format("1 to {} times num_key_value_heads ({})", kAttentionCudaGroupMax,
                                  config.num_kv_heads));
    }
    const std::pair<std::string_view, int64_t> sixteens[] = {
        {"vocab_size", config.vocab_size},
        {"hidden_size", config.hidden_size},
        {"intermediate_size", config.intermediate_size},
        {"moe_intermediate_size", config.moe_intermediate_size}};
    for (const auto& [field, value] : sixteens) {
        if (value % 16 != 0) {
            return refuse(field, value, "a multiple of 16");
        }
    }
    if (config.hidden_size > 16384) {
        return refuse("hidden_size", config.hidden_size, "at most 16384");
    }
    if (!config.router_sigmoid && config.first_k_dense < config.num_layers) {
        return refuse("moe_router_use_sigmoid", false, "sigmoid routing");
    }
    if (config.num_experts > kRouterCudaExpertsMax) {
        return refuse("num_experts", config.num_experts, fmt::format("at most {}", kRouterCudaExpertsMax));
    }
    if (config.num_experts_per_token > std::min(config.num_experts, kRouterCudaChosenMax)) {
        return refuse("num_experts_per_tok", config.num_experts_per_token,
                      fmt::format("at most {}", std::min(config.num_experts, kRouterCudaChosenMax)));
    }
    if (options.model.tokens_max > kMoeCudaTokensMax) {
        return refuse("the number of tokens in a step (--max-num-batched-tokens)", options.model.tokens_max,
                      fmt::format("at most {}", kMoeCudaTokensMax));
    }
    const DType kv = options.model.kv_dtype;
    if (kv != DType::kBFloat16 && kv != DType::kFloat8E4M3) {
        return refuse("the KV cache's dtype", dtype_name(kv), "bfloat16 or fp8_e4m3");
    }
    if (options.sequences_max > kSequencesMax) {
        return refuse("the number of sequences in a step", options.sequences_max,
                      fmt::format("at most {}", kSequencesMax));
    }
    return {};
}

class DevicePool final : public PagePool {
  public:
    DevicePool(DeviceBuffer memory, int64_t stride) : memory_(std::move(memory)), stride_(stride) {}
    PagePoolView view() const override { return {memory_.data(), stride_}; }

  private:
    DeviceBuffer memory_;
    int64_t stride_ = 0;
};

class CudaModelImpl final : public CudaModel {
  public:
    CudaModelImpl(std::unique_ptr<DeviceForward> forward, MemoryBudget& budget, DeviceBuffer inputs,
                  DeviceBuffer hidden)
        : forward_(std::move(forward)),
          budget_(budget),
          inputs_(std::move(inputs)),
          hidden_(std::move(hidden)) {}

    const ModelConfig& config() const override { return forward_->config(); }
    const PageFormat& page_format() const override { return forward_->page_format(); }
    int64_t packed_bytes() const override { return forward_->weight_bytes(); }
    DeviceForward& device() override { return *forward_; }
    MemoryBudget& budget() override { return budget_; }

    Result<std::unique_ptr<PagePool>> make_pool(int64_t pages) override {
        const int64_t stride = page_format().page_bytes();
        Result<DeviceBuffer> memory =
            DeviceBuffer::allocate(budget_, MemoryCategory::kKvPool, "KV pages", pages * stride);
        if (!memory.ok()) {
            return memory.status();
        }
        return std::unique_ptr<PagePool>(std::make_unique<DevicePool>(memory.take(), stride));
    }

    void forward(const ForwardBatch& batch, const ForwardOutput& output, ForwardTrace* trace) override {
        check(trace == nullptr, "forward: the CUDA backend keeps no trace");
        const DeviceBatch device = stage(batch.tokens, batch.sequences, batch.logit_rows, batch.pool);
        forward_->forward(stream_.get(), device);
        read_back(device, output);
    }

    void mtp_forward(const MtpBatch& batch, const ForwardOutput& output) override {
        const DeviceBatch device = stage(batch.next_tokens, batch.sequences, batch.logit_rows, batch.pool);
        const size_t count = batch.next_tokens.size() * static_cast<size_t>(config().hidden_size);
        rounded_.resize(count);
        std::transform(batch.hidden, batch.hidden + count, rounded_.begin(), f32_to_bf16);
        cuda_check(cudaMemcpyAsync(hidden_.data(), rounded_.data(), count * 2, cudaMemcpyHostToDevice,
                                   stream_.get()));
        forward_->mtp_forward(stream_.get(), device, hidden_.as<__nv_bfloat16>());
        read_back(device, output);
    }

    // int32 words of the largest batch's inputs.
    static int64_t input_words(const CudaModelOptions& options, int32_t pages_max) {
        const int64_t sequences = options.sequences_max;
        return int64_t{3} * options.model.tokens_max + sequences * (pages_max + 2) + 1 +
               options.model.logit_rows_max;
    }

  private:
    // The batch's inputs in device memory; every sequence is a prefill row.
    DeviceBatch stage(std::span<const TokenId> tokens, std::span<const SequenceSpan> sequences,
                      std::span<const int32_t> logit_rows, PagePoolView pool) {
        const auto pages_max = static_cast<size_t>(forward_->pages_max());
        words_.clear();
        const auto add = [&](std::span<const int32_t> values) {
            const size_t at = words_.size();
            words_.insert(words_.end(), values.begin(), values.end());
            return inputs_.as<int32_t>() + at;
        };
        std::vector<int32_t> positions;
        std::vector<int32_t> rows;
        std::vector<int32_t> first_positions;
        std::vector<int32_t> first_rows(1, 0);
        std::vector<int32_t> tables;
        for (const SequenceSpan& sequence : sequences) {
            for (int32_t i = 0; i < sequence.q_len; ++i) {
                positions.push_back(sequence.position + i);
                rows.push_back(static_cast<int32_t>(first_positions.size()));
            }
            first_positions.push_back(sequence.position);
            first_rows.push_back(first_rows.back() + sequence.q_len);
            const auto pages = sequence.pages.first(std::min(sequence.pages.size(), pages_max));
            tables.insert(tables.end(), pages.begin(), pages.end());
            tables.resize(first_positions.size() * pages_max, 0);
        }
        check(positions.size() == tokens.size(), "forward: the sequences do not cover the batch");
        DeviceBatch batch{.tokens_count = static_cast<int32_t>(tokens.size()),
                          .prefill_rows = static_cast<int32_t>(sequences.size()),
                          .logit_count = static_cast<int32_t>(logit_rows.size()),
                          .pool = pool.data};
        batch.tokens = add(tokens);
        batch.positions = add(positions);
        batch.sequences = add(rows);
        batch.first_positions = add(first_positions);
        batch.prefill_first_rows = add(first_rows);
        batch.page_tables = add(tables);
        batch.logit_rows = add(logit_rows);
        check(static_cast<int64_t>(words_.size()) * 4 <= inputs_.bytes(),
              "forward: the batch exceeds the workspaces");
        cuda_check(cudaMemcpyAsync(inputs_.data(), words_.data(), words_.size() * 4, cudaMemcpyHostToDevice,
                                   stream_.get()));
        return batch;
    }

    void read_back(const DeviceBatch& batch, const ForwardOutput& output) {
        if (output.logits != nullptr && batch.logit_count > 0) {
            const auto bytes = static_cast<size_t>(batch.logit_count * config().vocab_size) * 4;
            cuda_check(cudaMemcpyAsync(output.logits, forward_->logits(), bytes, cudaMemcpyDeviceToHost,
                                       stream_.get()));
        }
        const size_t count =
            static_cast<size_t>(batch.tokens_count) * static_cast<size_t>(config().hidden_size);
        if (output.hidden != nullptr) {
            rounded_.resize(count);
            cuda_check(cudaMemcpyAsync(rounded_.data(), forward_->hidden(), count * 2, cudaMemcpyDeviceToHost,
                                       stream_.get()));
        }
        stream_.synchronize();
        if (output.hidden != nullptr) {
            std::transform(rounded_.begin(), rounded_.end(), output.hidden, bf16_to_f32);
        }
    }

    std::unique_ptr<DeviceForward> forward_;
    MemoryBudget& budget_;
    Stream stream_;
    DeviceBuffer inputs_;
    DeviceBuffer hidden_;  // [tokens_max, hidden]; the MTP layer's input
    std::vector<int32_t> words_;
    std::vector<uint16_t> rounded_;
};

}  // namespace

Result<std::unique_ptr<CudaModel>> CudaModel::create(const ModelConfig& config, const ModelWeights& weights,
                                                     const CudaModelOptions& options,
                                                     const DeviceProps& device, MemoryBudget& budget) {
    if (Status status = supported(config, options); !status.ok()) {
        return status;
    }
    const int64_t tokens_max = options.model.tokens_max;
    Result<DeviceWeights> uploaded = upload_weights(config, weights,
                                                    {.weight_only = options.model.weight_only,
                                                     .tokens_max = tokens_max,
                                                     .random_seed = options.random_seed},
                                                    budget);
    if (!uploaded.ok()) {
        return uploaded.status();
    }
    Result<std::unique_ptr<DeviceForward>> forward =
        DeviceForward::create(config, uploaded.take(),
                              {.kv_dtype = options.model.kv_dtype,
                               .tokens_max = options.model.tokens_max,
                               .logit_rows_max = options.model.logit_rows_max,
                               .sequences_max = options.sequences_max,
                               .positions_max = options.positions_max,
                               .deterministic = options.deterministic},
                              device, budget);
    if (!forward.ok()) {
        return forward.status();
    }
    Result<DeviceBuffer> inputs =
        DeviceBuffer::allocate(budget, MemoryCategory::kWorkspace, "step inputs",
                               4 * CudaModelImpl::input_words(options, (*forward)->pages_max()));
    if (!inputs.ok()) {
        return inputs.status();
    }
    const int64_t hidden_bytes = config.num_mtp_layers > 0 ? tokens_max * config.hidden_size * 2 : 0;
    Result<DeviceBuffer> hidden =
        DeviceBuffer::allocate(budget, MemoryCategory::kWorkspace, "MTP input", hidden_bytes);
    if (!hidden.ok()) {
        return hidden.status();
    }
    return std::unique_ptr<CudaModel>(
        std::make_unique<CudaModelImpl>(forward.take(), budget, inputs.take(), hidden.take()));
}

}  // namespace tessera

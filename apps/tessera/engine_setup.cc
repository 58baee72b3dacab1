#include "engine_setup.h"

#include <algorithm>
#include <fmt/format.h>
#include <utility>

#include "base/build_mode.h"
#include "model_setup.h"
#include "runner/cpu_runner.h"

namespace tessera {
namespace {

constexpr int64_t kDefaultPoolBytes = int64_t{1} << 30;

// The runner with the model and the threads that it uses, as one owner.
class OwningRunner final : public Runner {
  public:
    OwningRunner(std::unique_ptr<ThreadPool> threads, std::unique_ptr<Hy3Model> model,
                 const CpuRunnerConfig& config)
        : threads_(std::move(threads)),
          model_(std::move(model)),
          runner_(make_cpu_runner(*model_, *threads_, config)) {}

    void launch(StepPlan plan) override { runner_->launch(std::move(plan)); }
    StepResult collect() override { return runner_->collect(); }
    int max_in_flight() const override { return runner_->max_in_flight(); }

  private:
    std::unique_ptr<ThreadPool> threads_;
    std::unique_ptr<Hy3Model> model_;
    std::unique_ptr<Runner> runner_;
};

struct PoolSize {
    int32_t pages = 0;
    int64_t bytes = 0;
};

// Enough pages for one request of the longest length, whatever was asked for.
Result<PoolSize> size_pool(const EngineOptions& options, int32_t max_model_len, int64_t page_bytes) {
    const int64_t needed = (max_model_len + kPageTokens - 1) / kPageTokens;
    int64_t pages = options.num_pages;
    if (pages == 0) {
        const int64_t bytes = options.kv_cache_bytes > 0 ? options.kv_cache_bytes
                                                         : std::max(kDefaultPoolBytes, needed * page_bytes);
        pages = bytes / page_bytes;
    }
    if (pages < needed) {
        return invalid_argument(
            fmt::format("the KV cache of {} pages ({:.1f} MB) cannot hold one request of --max-model-len {}, "
                        "which needs {} pages "
                        "({:.1f} MB): raise --kv-cache-memory-bytes or lower --max-model-len to at most {}",
                        pages, static_cast<double>(pages * page_bytes) * 1e-6, max_model_len, needed,
                        static_cast<double>(needed * page_bytes) * 1e-6, pages * kPageTokens));
    }
    if (pages > INT32_MAX) {
        return invalid_argument("the KV cache has more than 2^31 pages: lower --kv-cache-memory-bytes");
    }
    return PoolSize{static_cast<int32_t>(pages), pages * page_bytes};
}

Result<int32_t> resolve_max_model_len(const EngineOptions& options, const ModelConfig& config) {
    if (options.max_model_len > config.max_position_embeddings) {
        return invalid_argument(fmt::format("--max-model-len {} is longer than the model's context of {}",
                                            options.max_model_len, config.max_position_embeddings));
    }
    if (options.max_model_len == 1 || config.max_position_embeddings < 2) {
        return invalid_argument("a context of 1 token has no room for an answer; at least 2 are needed");
    }
    return options.max_model_len > 0 ? options.max_model_len
                                     : static_cast<int32_t>(config.max_position_embeddings);
}

EngineConfig engine_config(const EngineOptions& options, const ModelBundle& model,
                           const EngineBundle& bundle) {
    EngineConfig config;
    config.num_pages = bundle.num_pages;
    config.prefix_caching = options.prefix_caching;
    config.max_queued_requests = options.max_queued_requests;
    config.max_queued_tokens = options.max_queued_tokens;
    config.scheduler.max_num_seqs = options.max_num_seqs;
    config.scheduler.max_num_batched_tokens = options.max_num_batched_tokens;
    config.scheduler.max_model_len = bundle.max_model_len;
    config.scheduler.eos_ids = model.config.eos_token_ids;
    config.scheduler.identity.weights_fingerprint = model.fingerprint;
    config.scheduler.identity.format = model.model->page_format();
    config.scheduler.identity.kv_scales = model.kv_scales;
    return config;
}

}  // namespace

Result<EngineBundle> make_engine(const EngineOptions& options) {
    if (options.device != "cpu") {
        return invalid_argument(
            fmt::format("--device {}: this build has only the cpu backend", options.device));
    }
    if (options.max_num_batched_tokens < options.max_num_seqs) {
        return invalid_argument(
            fmt::format("--max-num-batched-tokens {} is below --max-num-seqs {}: a step must hold a token of "
                        "every sequence",
                        options.max_num_batched_tokens, options.max_num_seqs));
    }
    EngineBundle bundle;
    Result<std::unique_ptr<Tokenizer>> tokenizer = Tokenizer::load(options.model);
    if (!tokenizer.ok()) {
        return tokenizer.status();
    }
    bundle.tokenizer = tokenizer.take();
    Result<ModelBundle> model = make_model({.folder = options.model,
                                            .kv_cache_dtype = options.kv_cache_dtype,
                                            .threads = options.threads,
                                            .tokens_max = options.max_num_batched_tokens,
                                            .logit_rows_max = options.max_num_seqs,
                                            .weight_only = options.weight_only,
                                            .progress = options.progress});
    if (!model.ok()) {
        return model.status();
    }
    Result<int32_t> max_model_len = resolve_max_model_len(options, model->config);
    if (!max_model_len.ok()) {
        return max_model_len.status();
    }
    bundle.max_model_len = *max_model_len;
    Result<PoolSize> pool =
        size_pool(options, bundle.max_model_len, model->model->page_format().page_bytes());
    if (!pool.ok()) {
        return pool.status();
    }
    bundle.num_pages = pool->pages;
    bundle.kv_cache_bytes = pool->bytes;
    bundle.config = model->config;
    bundle.generation = model->generation;
    bundle.weight_bytes = model->weight_bytes;
    bundle.kv_cache_dtype = dtype_name(model->model->page_format().kv_dtype);
    bundle.threads = model->threads->size();
    const EngineConfig config = engine_config(options, *model, bundle);
    const CpuRunnerConfig runner{.num_pages = bundle.num_pages,
                                 .max_num_seqs = options.max_num_seqs,
                                 .max_num_batched_tokens = options.max_num_batched_tokens,
                                 .poison = kDebugBuild};
    bundle.engine = std::make_unique<Engine>(
        config, std::make_unique<OwningRunner>(std::move(model->threads), std::move(model->model), runner));
    return bundle;
}

}  // namespace tessera

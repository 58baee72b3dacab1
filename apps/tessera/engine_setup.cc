#include "engine_setup.h"

#include <algorithm>
#include <fmt/format.h>
#include <unistd.h>
#include <utility>

#include "base/build_mode.h"
#include "device_model.h"
#include "model_setup.h"
#include "runner/cpu_runner.h"
#include "step_time.h"

namespace tessera {
namespace {

constexpr int64_t kDefaultPoolBytes = int64_t{1} << 30;

// The runner with the model and the threads that it uses, as one owner.
class OwningRunner final : public Runner {
  public:
    OwningRunner(std::unique_ptr<ThreadPool> threads, std::unique_ptr<Hy3Model> model,
                 std::unique_ptr<Runner> runner)
        : threads_(std::move(threads)), model_(std::move(model)), runner_(std::move(runner)) {}

    void launch(StepPlan plan) override { runner_->launch(std::move(plan)); }
    StepResult collect() override { return runner_->collect(); }
    int max_in_flight() const override { return runner_->max_in_flight(); }

  private:
    std::unique_ptr<ThreadPool> threads_;
    std::unique_ptr<Hy3Model> model_;
    std::unique_ptr<Runner> runner_;
};

bool takes_rest_of_device(const EngineOptions& options) {
    return options.device == "cuda" && options.num_pages == 0 && options.kv_cache_bytes == 0;
}

// The pool's pages as asked for; 0 = on CUDA, what the device has left.
int64_t wanted_pages(const EngineOptions& options, int64_t needed, int64_t page_bytes) {
    if (options.num_pages > 0) {
        return options.num_pages;
    }
    if (options.kv_cache_bytes > 0) {
        return options.kv_cache_bytes / page_bytes;
    }
    return options.device == "cuda" ? 0 : std::max(kDefaultPoolBytes / page_bytes, needed);
}

// Enough pages for one request of the longest length, whatever was asked for. Without a flag the device's
// memory decides.
Status check_pool(int64_t pages, int32_t max_model_len, int64_t page_bytes, const EngineOptions& options) {
    const int64_t needed = (max_model_len + kPageTokens - 1) / kPageTokens;
    const std::string flag = takes_rest_of_device(options) ? "--gpu-memory-utilization" : options.pool_flag;
    if (pages < needed) {
        const std::string shorter =
            pages > 0 ? fmt::format(" or lower --max-model-len to at most {}", pages * kPageTokens) : "";
        return invalid_argument(
            fmt::format("the KV cache of {} pages ({:.1f} MB) cannot hold one request of --max-model-len {}, "
                        "which needs {} pages ({:.1f} MB): raise {}{}",
                        pages, static_cast<double>(pages * page_bytes) * 1e-6, max_model_len, needed,
                        static_cast<double>(needed * page_bytes) * 1e-6, flag, shorter));
    }
    if (pages > INT32_MAX) {
        return invalid_argument(fmt::format("the KV cache has more than 2^31 pages: lower {}", flag));
    }
    return {};
}

// Sizes the pool; sets its figures in the bundle.
Result<std::unique_ptr<Runner>> make_runner(ModelBundle model, const EngineOptions& options,
                                            EngineBundle& bundle) {
    const int64_t page_bytes = model.model->page_format().page_bytes();
    const int64_t needed = (bundle.max_model_len + kPageTokens - 1) / kPageTokens;
    const int64_t wanted = wanted_pages(options, needed, page_bytes);
    if (!takes_rest_of_device(options)) {
        if (Status status = check_pool(wanted, bundle.max_model_len, page_bytes, options); !status.ok()) {
            return status;
        }
    }
    if (options.device == "cpu") {
        const Status status =
            check_host_memory(fmt::format("the KV cache of {} pages", wanted),
                              static_cast<double>(wanted) * static_cast<double>(page_bytes),
                              fmt::format("lower {} or --max-model-len", options.pool_flag));
        if (!status.ok()) {
            return status;
        }
    }
    bundle.num_pages = static_cast<int32_t>(wanted);
    std::unique_ptr<Runner> runner;
    if (options.device == "cuda") {
        Result<DeviceRunner> made = make_cuda_runner(std::move(model), options, bundle.num_pages);
        if (!made.ok()) {
            return made.status();
        }
        bundle.num_pages = made->num_pages;
        runner = std::move(made->runner);
    } else {
        const CpuRunnerConfig config{.num_pages = bundle.num_pages,
                                     .max_num_seqs = options.max_num_seqs,
                                     .max_num_batched_tokens = options.max_num_batched_tokens,
                                     .poison = kDebugBuild};
        Result<std::unique_ptr<Runner>> made = make_cpu_runner(*model.model, *model.threads, config);
        if (!made.ok()) {
            return made.status();
        }
        runner =
            std::make_unique<OwningRunner>(std::move(model.threads), std::move(model.model), made.take());
    }
    if (Status status = check_pool(bundle.num_pages, bundle.max_model_len, page_bytes, options);
        !status.ok()) {
        return status;
    }
    bundle.kv_cache_bytes = bundle.num_pages * page_bytes;
    return runner;
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
    config.scheduler.identity.deterministic = options.deterministic || options.device == "cpu";
    return config;
}

}  // namespace

int32_t default_batched_tokens(const std::string& device) {
    return device == "cuda" ? 4096 : 512;
}

int32_t batched_tokens(const EngineOptions& options) {
    return options.max_num_batched_tokens > 0
               ? options.max_num_batched_tokens
               : std::max(default_batched_tokens(options.device), options.max_num_seqs);
}

Result<EngineBundle> make_engine(const EngineOptions& given) {
    EngineOptions options = given;
    options.max_num_batched_tokens = batched_tokens(given);
    if (options.device != "cpu" && options.device != "cuda") {
        return invalid_argument(fmt::format("--device {}: give cpu or cuda", options.device));
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
    // What can be wrong without the weights and the device comes before them.
    const Result<ModelConfig> config_alone = load_model_config(options.model);
    if (!config_alone.ok()) {
        return config_alone.status();
    }
    const Result<int32_t> max_model_len = resolve_max_model_len(options, *config_alone);
    if (!max_model_len.ok()) {
        return max_model_len.status();
    }
    Result<ModelBundle> model = make_model({.folder = options.model,
                                            .device = options.device,
                                            .kv_cache_dtype = options.kv_cache_dtype,
                                            .threads = options.threads,
                                            .tokens_max = options.max_num_batched_tokens,
                                            .logit_rows_max = options.max_num_seqs,
                                            .sequences_max = options.max_num_seqs,
                                            .positions_max = options.max_model_len,
                                            .gpu_memory_utilization = options.gpu_memory_utilization,
                                            .weight_only = options.weight_only,
                                            .deterministic = options.deterministic,
                                            .progress = options.progress});
    if (!model.ok()) {
        return model.status();
    }
    if (bundle.tokenizer->size() > model->config.vocab_size) {
        return invalid_argument(
            fmt::format("{}/tokenizer.json has ids up to {}, but config.json a vocab_size of {}: an id "
                        "without a row in the "
                        "embedding cannot be computed",
                        options.model, bundle.tokenizer->size() - 1, model->config.vocab_size));
    }
    bundle.max_model_len = *max_model_len;
    bundle.config = model->config;
    bundle.generation = model->generation;
    bundle.weight_bytes = model->weight_bytes;
    bundle.kv_cache_dtype = dtype_name(model->model->page_format().kv_dtype);
    bundle.threads = model->threads->size();
    EngineConfig config = engine_config(options, *model, bundle);
    if (options.target_tpot_s > 0 && options.device == "cpu") {
        config.scheduler.target_tpot_s = options.target_tpot_s;
        config.scheduler.step_time = measure_step_time(*model->model, options.max_num_batched_tokens);
    }
    Result<std::unique_ptr<Runner>> runner = make_runner(model.take(), options, bundle);
    if (!runner.ok()) {
        return runner.status();
    }
    config.num_pages = bundle.num_pages;
    bundle.engine = std::make_unique<Engine>(config, runner.take());
    return bundle;
}

}  // namespace tessera

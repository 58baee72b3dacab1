// tessera bench engine on a CUDA device: the runner that serves, driven with plans made here.
#include <algorithm>
#include <cstdio>
#include <fmt/format.h>

#include "bench_engine.h"
#include "device/cuda/device_props.h"
#include "device/memory_budget.h"
#include "engine_table.h"
#include "idle_host.h"
#include "model/cuda/device_forward.h"
#include "model/cuda/hy3_cuda_model.h"
#include "model/cuda/random_weights.h"
#include "model_configs.h"
#include "step_driver.h"
#include "weights/loader.h"

namespace tessera {
namespace {

constexpr uint64_t kSeed = 20'26;
// Longer prompts are timed without the operators' table, which takes some 15 passes of its own.
constexpr int32_t kProbedPromptMax = 8192;
constexpr int32_t kProbeReplays = 3;
constexpr int32_t kIdleBatch = 16;
constexpr int64_t kIdleTokens = 512;

// What is measured: a model on the device, and the runner over it. Members are destroyed bottom up.
struct DeviceBench {
    const BenchEngineArguments& arguments;
    DeviceProps props;
    MemoryBudget budget;
    ModelConfig config;
    DType weights = DType::kBFloat16;  // of the experts
    std::unique_ptr<CudaModel> model;
    std::unique_ptr<CudaRunner> runner;
    EngineTable table;

    Status make_model();
    Status make_runner();
    std::string model_text() const;
    ModelBytes element_bytes() const;
    OperatorCosts costs(const PassShape& shape) const {
        return operator_costs(config, shape, element_bytes());
    }
    int64_t all_experts() const { return config.num_experts * (config.num_layers - config.first_k_dense); }
    bool fits(std::string_view what, int64_t tokens, int64_t pages) const;
};

Status DeviceBench::make_model() {
    const ModelSetup& setup = arguments.setup;
    Result<DType> kv_dtype = parse_kv_dtype("cuda", setup.kv_cache_dtype);
    if (!kv_dtype.ok()) {
        return kv_dtype.status();
    }
    LoadedModel loaded;
    CudaModelOptions options;
    if (setup.folder.empty()) {
        Result<ModelConfig> whole = find_model_config(arguments.model_config);
        Result<ModelConfig> part = whole.ok() ? with_layers(whole.take(), arguments.layers) : whole;
        if (!part.ok()) {
            return part.status();
        }
        loaded.config = part.take();
        loaded.weights =
            random_weights(loaded.config, arguments.dtype == "fp8" ? DType::kFloat8E4M3 : DType::kBFloat16);
        options.random_seed = kSeed;
    } else {
        Result<LoadedModel> folder = load_model(setup.folder, {});
        if (!folder.ok()) {
            return folder.status();
        }
        loaded = folder.take();
    }
    config = loaded.config;
    options.model = {.kv_dtype = *kv_dtype,
                     .weight_only = setup.weight_only,
                     .tokens_max = setup.tokens_max,
                     .logit_rows_max = setup.logit_rows_max};
    options.sequences_max = setup.sequences_max;
    options.deterministic = setup.deterministic;
    options.positions_max = static_cast<int32_t>(
        std::min(arguments.longest_sequence() + kPageTokens, config.max_position_embeddings));
    Result<std::unique_ptr<CudaModel>> made =
        CudaModel::create(config, loaded.weights, options, props, budget);
    if (!made.ok()) {
        return made.status();
    }
    model = made.take();
    weights = model->device().projection_dtype();
    return {};
}

Status DeviceBench::make_runner() {
    Result<std::unique_ptr<CudaRunner>> made =
        CudaRunner::create(*model, {.max_num_seqs = arguments.setup.sequences_max,
                                    .max_num_batched_tokens = arguments.setup.tokens_max});
    if (!made.ok()) {
        return made.status();
    }
    runner = made.take();
    runner->fill_pages(kSeed);
    std::fprintf(stderr, "device memory of %s:\n%s", props.name.c_str(), budget.table().c_str());
    return {};
}

std::string DeviceBench::model_text() const {
    const std::string layers = fmt::format("{} layers ({} dense)", config.num_layers, config.first_k_dense);
    return arguments.setup.folder.empty()
               ? fmt::format("{}, {}, random weights", arguments.model_config, layers)
               : fmt::format("{}, {}", arguments.setup.folder, layers);
}

ModelBytes DeviceBench::element_bytes() const {
    return {.weight = dtype_size(weights),
            .plain = 2,
            .kv = dtype_size(model->page_format().kv_dtype),
            .activation = 2};
}

bool DeviceBench::fits(std::string_view what, int64_t tokens, int64_t pages) const {
    std::string why;
    if (tokens > config.max_position_embeddings) {
        why = fmt::format("the model's context is {} tokens", config.max_position_embeddings);
    } else if (pages > runner->num_pages()) {
        why = fmt::format("needs {} KV pages of {}, and the device has room for {}", pages,
                          format_bytes(model->page_format().page_bytes()), runner->num_pages());
    }
    if (!why.empty()) {
        std::fprintf(stderr, "%.*s: skipped, %s\n", static_cast<int>(what.size()), what.data(), why.c_str());
    }
    return why.empty();
}

Result<MeasuredPass> measure_prefill(DeviceBench& bench, StepDriver& driver, int32_t tokens) {
    MeasuredPass pass{
        .prefill = true, .tokens = tokens, .chunk = std::min(bench.arguments.setup.tokens_max, tokens)};
    Result<DrivenSteps> steps =
        driver.prefill({.tokens = tokens,
                        .chunk = pass.chunk,
                        .rounds = bench.arguments.rounds,
                        .probe_replays = tokens <= kProbedPromptMax ? kProbeReplays : 0});
    if (!steps.ok()) {
        return steps.status();
    }
    pass.steps = steps.take();
    pass.experts_touched =
        pass.steps.probed ? pass.steps.probe.experts_touched : static_cast<double>(bench.all_experts());
    // One pass of the weights, however many chunks: a floor.
    pass.costs = bench.costs({.tokens = tokens,
                              .logit_rows = 1,
                              .attended = int64_t{tokens} * (tokens + 1) / 2,
                              .cached_slots = tokens,
                              .experts_touched = static_cast<int64_t>(pass.experts_touched + 0.5)});
    return pass;
}

Result<MeasuredPass> measure_decode(DeviceBench& bench, StepDriver& driver, int32_t batch, int32_t context) {
    MeasuredPass pass{.batch = batch, .tokens = context};
    Result<DrivenSteps> steps = driver.decode(batch, context, bench.arguments.steps);
    if (!steps.ok()) {
        return steps.status();
    }
    pass.steps = steps.take();
    pass.experts_touched = pass.steps.probe.experts_touched;
    const int64_t slots = int64_t{batch} * context;
    pass.costs = bench.costs({.tokens = batch,
                              .logit_rows = batch,
                              .attended = slots,
                              .cached_slots = slots,
                              .experts_touched = static_cast<int64_t>(pass.experts_touched + 0.5)});
    return pass;
}

Status measure_passes(DeviceBench& bench) {
    const BenchEngineArguments& arguments = bench.arguments;
    StepDriver driver(*bench.runner, bench.config.vocab_size);
    std::vector<MeasuredPass> passes;
    const auto keep = [&](Result<MeasuredPass> pass) -> Status {
        if (pass.ok()) {
            print_pass(bench.table, *pass);
            passes.push_back(pass.take());
        }
        return pass.status();
    };
    for (const int32_t tokens : arguments.prompt_tokens) {
        if (bench.fits(fmt::format("prefill of {}", tokens), tokens, StepDriver::prefill_pages(tokens))) {
            if (Status status = keep(measure_prefill(bench, driver, tokens)); !status.ok()) {
                return status;
            }
        }
    }
    for (const int32_t context : arguments.contexts) {
        for (const int32_t batch : arguments.batches) {
            if (bench.fits(fmt::format("decode, batch {}, context {}", batch, context),
                           context + arguments.steps,
                           StepDriver::decode_pages(batch, context, arguments.steps))) {
                if (Status status = keep(measure_decode(bench, driver, batch, context)); !status.ok()) {
                    return status;
                }
            }
        }
    }
    for (const MeasuredPass& pass : passes) {
        print_operators(bench.table, pass);
    }
    return {};
}

Status measure_idle(DeviceBench& bench) {
    const ModelSetup& setup = bench.arguments.setup;
    const int32_t batch = std::min({kIdleBatch, setup.sequences_max, setup.tokens_max / kIdlePromptTokens});
    const int64_t positions =
        std::min(bench.arguments.longest_sequence(), bench.config.max_position_embeddings - 1);
    const auto tokens = static_cast<int32_t>(std::min(kIdleTokens, positions - kIdlePromptTokens));
    if (batch < 1 || tokens < 64 || bench.runner->num_pages() < batch * (tokens / kPageTokens + 3)) {
        std::fprintf(stderr, "the idle host is not measured: too few pages or tokens\n");
        return {};
    }
    Result<IdleHost> idle = measure_idle_host(*bench.runner, bench.config, batch, tokens);
    if (idle.ok()) {
        print_idle_host(bench.table, *idle);
    }
    return idle.status();
}

}  // namespace

Status bench_engine_on_device(const BenchEngineArguments& arguments) {
    Result<DeviceProps> props = open_device(0);
    if (!props.ok()) {
        return props.status();
    }
    DeviceBench bench{.arguments = arguments,
                      .props = *props,
                      .budget = MemoryBudget(usable_bytes(*props, arguments.setup.gpu_memory_utilization))};
    Result<DeviceRates> rates = measure_device_rates(bench.budget);
    if (!rates.ok()) {
        return rates.status();
    }
    const TimeNs started = now_ns();
    Status status = bench.make_model();
    if (status.ok()) {
        status = bench.make_runner();
    }
    if (!status.ok()) {
        return status;
    }
    bench.table = {.model = bench.model_text(),
                   .dtype = fmt::format("{} weights, {} KV", dtype_name(bench.weights),
                                        dtype_name(bench.model->page_format().kv_dtype)),
                   .fp8 = bench.weights == DType::kFloat8E4M3,
                   .fp8_kv = bench.model->page_format().kv_dtype == DType::kFloat8E4M3,
                   .rates = *rates,
                   .ready_s = seconds(now_ns() - started),
                   .json = arguments.json};
    print_head(bench.table);
    status = measure_passes(bench);
    return status.ok() ? measure_idle(bench) : status;
}

}  // namespace tessera

// tessera bench engine on the CPU: each measure beside the larger of the bytes touched over the read
// bandwidth and the multiply-adds over the FMA rate, both measured in the same run.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <fmt/format.h>
#include <fstream>
#include <unistd.h>

#include "base/json.h"
#include "base/median.h"
#include "bench_engine.h"
#include "device/host_buffer.h"
#include "engine_cost.h"
#include "ops/common/packed_matrix.h"
#include "ops/harness.h"
#include "ops/op_case.h"
#include "ops/sample/sample.h"
#include "weights/loader.h"

namespace tessera {
namespace {

struct Measured {
    std::string phase;
    int32_t batch = 1;
    int32_t prompt_tokens = 0;
    int32_t context = 0;
    double step_us = 0;
    double floor_us = 0;
    double tokens_per_s = 0;
    MachineRates rates;
    PassCost cost;
};

int64_t resident_bytes() {
    std::ifstream statm("/proc/self/statm");
    int64_t pages = 0;
    statm >> pages >> pages;
    return pages * sysconf(_SC_PAGESIZE);
}

// What the packed model does not show.
struct ModelFacts {
    std::vector<std::vector<float>> biases;  // of the routers: [layers][experts], empty where there is none
    // As the model packs them.
    DType projections = DType::kBFloat16;
    DType head = DType::kBFloat16;
    bool int4_experts = false;
};

// Drives the model with the runner's batch shapes: chunks of a prompt, or one token of each sequence.
class EngineBench {
  public:
    // What grows with the arguments.
    struct Memory {
        HostBuffer pool;
        SampleWorkspace sampling;
    };
    static Result<Memory> allocate(const ModelBundle& bundle, const BenchEngineArguments& arguments) {
        const int64_t pages = pages_each(arguments) * arguments.setup.logit_rows_max;
        const int64_t bytes = bundle.model->page_format().page_bytes() * pages;
        const std::string what = fmt::format("the KV cache of {} pages", pages);
        constexpr std::string_view kAdvice = "lower --batch, --context or --prompt-tokens";
        if (Status status = check_host_memory(what, static_cast<double>(bytes), kAdvice); !status.ok()) {
            return status;
        }
        Result<HostBuffer> pool = HostBuffer::allocate(bytes, what, kAdvice);
        if (!pool.ok()) {
            return pool.status();
        }
        Result<SampleWorkspace> sampling =
            SampleWorkspace::create(bundle.config.vocab_size, bundle.threads->size());
        if (!sampling.ok()) {
            return sampling.status();
        }
        return Memory{pool.take(), sampling.take()};
    }

    EngineBench(ModelBundle& bundle, const BenchEngineArguments& arguments, const ModelFacts& facts,
                Memory memory)
        : model_(*bundle.model),
          config_(bundle.config),
          threads_(*bundle.threads),
          arguments_(arguments),
          facts_(facts),
          memory_(std::move(memory)),
          pages_each_(static_cast<int32_t>(pages_each(arguments))) {
        const int32_t batch_max = arguments.setup.logit_rows_max;
        const auto slots = static_cast<int32_t>(arguments.longest_sequence()) + 1;
        logits_.resize(static_cast<size_t>(batch_max * config_.vocab_size));
        for (int32_t sequence = 0; sequence < batch_max; ++sequence) {
            std::vector<PageId>& pages = tables_.emplace_back();
            OpRandom random(static_cast<uint64_t>(sequence) + 1);
            for (int32_t page = 0; page < pages_each_; ++page) {
                pages.push_back(sequence * pages_each_ + page);
            }
            std::vector<TokenId>& prompt = prompts_.emplace_back();
            for (int32_t i = 0; i < slots; ++i) {  // special tokens lie at the end of the vocabulary
                prompt.push_back(
                    static_cast<TokenId>(random.below(config_.vocab_size - config_.vocab_size / 16)));
            }
        }
    }

    Measured prefill(int32_t tokens) {
        Measured best{.phase = "prefill", .batch = 1, .prompt_tokens = tokens};
        const PassCost cost = prefill_cost(tokens);
        for (int32_t round = 0; round < arguments_.rounds; ++round) {
            const MachineRates rates = measure_rates(cost);
            const TimeNs start = now_ns();
            run_prompt(0, tokens);
            keep_best(best, static_cast<double>(now_ns() - start) * 1e-3, rates, cost);
        }
        best.tokens_per_s = tokens / best.step_us * 1e6;
        return best;
    }

    Measured decode(int32_t batch, int32_t context) {
        Measured best{.phase = "decode", .batch = batch, .context = context};
        const int32_t begin = std::max(1, context - arguments_.steps / 2);
        for (int32_t sequence = 0; sequence < batch; ++sequence) {
            run_prompt(sequence, begin);
        }
        const PassCost cost = decode_cost(batch, begin);
        for (int32_t round = 0; round < arguments_.rounds; ++round) {
            const MachineRates rates = measure_rates(cost);
            std::vector<double> times;
            std::vector<TokenId> tokens = first_tokens(batch, begin);
            for (int32_t step = 0; step < arguments_.steps; ++step) {
                const TimeNs start = now_ns();
                decode_step(tokens, begin + step, nullptr);
                times.push_back(static_cast<double>(now_ns() - start) * 1e-3);
            }
            keep_best(best, median(std::move(times)), rates, cost);
        }
        best.tokens_per_s = batch / best.step_us * 1e6;
        return best;
    }

  private:
    static int64_t pages_each(const BenchEngineArguments& arguments) {
        return (arguments.longest_sequence() + 1 + kPageTokens - 1) / kPageTokens;
    }

    // The round whose time is nearest to its own floor.
    static void keep_best(Measured& best, double us, const MachineRates& rates, const PassCost& cost) {
        const double floor = std::max(cost.bytes / rates.bytes_per_s, cost.fmas / rates.fma_per_s) * 1e6;
        if (best.step_us == 0 || floor / us > best.floor_us / best.step_us) {
            best.step_us = us;
            best.floor_us = floor;
            best.rates = rates;
            best.cost = cost;
        }
    }

    MachineRates measure_rates(const PassCost& cost) {
        return {measure_fma_rate(threads_, 0.05),
                measure_read_bandwidth(threads_, static_cast<int64_t>(cost.bytes), 0.1)};
    }

    // Chunks as the scheduler cuts them; the last one asks for the last token's logits.
    void run_prompt(int32_t sequence, int32_t tokens) {
        const std::vector<TokenId>& prompt = prompts_[static_cast<size_t>(sequence)];
        for (int32_t done = 0; done < tokens;) {
            const int32_t count = std::min(arguments_.setup.tokens_max, tokens - done);
            const SequenceSpan span{
                .q_len = count, .position = done, .pages = tables_[static_cast<size_t>(sequence)]};
            const int32_t last = count - 1;
            const bool wanted = done + count == tokens;
            const ForwardBatch batch{
                .tokens = std::span(prompt).subspan(static_cast<size_t>(done), static_cast<size_t>(count)),
                .sequences = {&span, 1},
                .logit_rows = {&last, wanted ? 1u : 0u},
                .pool = {memory_.pool.data(), model_.page_format().page_bytes()}};
            model_.forward(batch, {.logits = logits_.data()});
            done += count;
        }
    }

    void decode_step(std::vector<TokenId>& tokens, int32_t position, ForwardTrace* trace) {
        spans_.clear();
        rows_.clear();
        for (size_t i = 0; i < tokens.size(); ++i) {
            spans_.push_back(
                {.first = static_cast<int32_t>(i), .q_len = 1, .position = position, .pages = tables_[i]});
            rows_.push_back(static_cast<int32_t>(i));
        }
        model_.forward({.tokens = tokens,
                        .sequences = spans_,
                        .logit_rows = rows_,
                        .pool = {memory_.pool.data(), model_.page_format().page_bytes()}},
                       {.logits = logits_.data()}, trace);
        sample_rows_.assign(tokens.size(), {.temperature = 0});
        results_.resize(tokens.size());
        for (size_t i = 0; i < tokens.size(); ++i) {
            sample_rows_[i].logits = logits_.data() + static_cast<int64_t>(i) * config_.vocab_size;
        }
        OpContext context{threads_};
        sample(context, {config_.vocab_size, sample_rows_, results_, &memory_.sampling});
        for (size_t i = 0; i < tokens.size(); ++i) {
            tokens[i] = results_[i].token;
        }
    }

    // The prompt's own token at the first decoded position, so that sequences stay apart.
    std::vector<TokenId> first_tokens(int32_t batch, int32_t position) const {
        std::vector<TokenId> tokens;
        for (int32_t i = 0; i < batch; ++i) {
            tokens.push_back(prompts_[static_cast<size_t>(i)][static_cast<size_t>(position)]);
        }
        return tokens;
    }

    int64_t count_experts(const ForwardTrace& trace) const {
        int64_t total = 0;
        for (size_t layer = 0; layer < trace.router_logits.size(); ++layer) {
            if (!trace.router_logits[layer].empty()) {
                total += count_touched_experts(trace.router_logits[layer], facts_.biases[layer], config_);
            }
        }
        return total;
    }

    ModelBytes element_bytes() const {
        constexpr double kInt4Bytes = 0.5 + 2.0 / kInt4Group;  // a code, and its share of a bfloat16 scale
        return {.weight = dtype_size(facts_.projections),
                .expert = facts_.int4_experts ? kInt4Bytes : 0,
                .plain = dtype_size(facts_.head),
                .kv = dtype_size(model_.page_format().kv_dtype)};
    }

    PassCost prefill_cost(int64_t tokens) {
        const int64_t experts = std::min(config_.num_experts, tokens * config_.num_experts_per_token);
        // One pass of the weights, however many chunks: a floor.
        return pass_cost(config_,
                         {.tokens = tokens,
                          .logit_rows = 1,
                          .attended = tokens * (tokens + 1) / 2,
                          .cached_slots = tokens,
                          .experts_touched = experts * (config_.num_layers - config_.first_k_dense)},
                         element_bytes());
    }

    // The mean over the steps, with the experts that they really choose.
    PassCost decode_cost(int32_t batch, int32_t begin) {
        PassCost mean;
        std::vector<TokenId> tokens = first_tokens(batch, begin);
        for (int32_t step = 0; step < arguments_.steps; ++step) {
            ForwardTrace trace;
            decode_step(tokens, begin + step, &trace);
            const int64_t slots = int64_t{batch} * (begin + step + 1);
            const PassCost cost = pass_cost(config_,
                                            {.tokens = batch,
                                             .logit_rows = batch,
                                             .attended = slots,
                                             .cached_slots = slots,
                                             .experts_touched = count_experts(trace)},
                                            element_bytes());
            mean.fmas += cost.fmas / arguments_.steps;
            mean.bytes += cost.bytes / arguments_.steps;
        }
        return mean;
    }

    Hy3Model& model_;
    const ModelConfig& config_;
    ThreadPool& threads_;
    const BenchEngineArguments& arguments_;
    const ModelFacts& facts_;
    Memory memory_;
    const int32_t pages_each_;  // of a sequence
    std::vector<float> logits_;
    std::vector<std::vector<PageId>> tables_;
    std::vector<std::vector<TokenId>> prompts_;
    std::vector<SequenceSpan> spans_;
    std::vector<int32_t> rows_;
    std::vector<SampleRowArgs> sample_rows_;
    std::vector<SampleRowResult> results_;
};

Result<ModelFacts> load_facts(const std::string& folder) {
    Result<LoadedModel> loaded = load_model(folder);
    if (!loaded.ok()) {
        return loaded.status();
    }
    const ModelWeights& weights = loaded->weights;
    ModelFacts facts{.projections = packed_dtype(weights.layers.back().attention.q.weight.dtype),
                     .head = packed_dtype(weights.lm_head.weight.dtype)};
    for (const LayerWeights& layer : weights.layers) {
        std::vector<float>& bias = facts.biases.emplace_back();
        facts.int4_experts = facts.int4_experts || (layer.moe && layer.moe->experts.front().gate.int4);
        if (layer.moe && layer.moe->expert_bias.data != nullptr) {
            const auto* data = static_cast<const float*>(layer.moe->expert_bias.data);
            bias.assign(data, data + layer.moe->expert_bias.cols);
        }
    }
    return facts;
}

struct Report {
    std::string dtype;
    double ready_s = 0;
    int threads = 0;
    bool json = false;
};

void print_line(const Measured& m, const Report& report) {
    std::fprintf(stderr, "%-8s %6d %8d %12.0f %12.1f %12.1f %8.0f %% %10.1f %10.1f\n", m.phase.c_str(),
                 m.batch, m.phase == "prefill" ? m.prompt_tokens : m.context, m.tokens_per_s, m.step_us,
                 m.floor_us, m.floor_us / m.step_us * 100, m.rates.fma_per_s * 1e-9,
                 m.rates.bytes_per_s * 1e-9);
    if (!report.json) {
        return;
    }
    const bool prefill = m.phase == "prefill";
    const auto rate = [&](bool mine) {
        return mine ? json::Value(std::round(m.tokens_per_s * 10) / 10) : json::Value();
    };
    fmt::print("{}\n",
               json::dump(json::Value::object({{"device", "cpu"},
                                               {"dtype", report.dtype},
                                               {"batch", m.batch},
                                               {"prompt_tokens", m.prompt_tokens},
                                               {"context", m.context},
                                               {"prefill_tokens_per_s", rate(prefill)},
                                               {"decode_tokens_per_s", rate(!prefill)},
                                               {"step_us", std::round(m.step_us * 10) / 10},
                                               {"floor_us", std::round(m.floor_us * 10) / 10},
                                               {"ready_s", std::round(report.ready_s * 1000) / 1000},
                                               {"rss_bytes", resident_bytes()},
                                               {"engine", "tessera"},
                                               {"threads", report.threads},
                                               {"bytes", static_cast<int64_t>(m.cost.bytes)},
                                               {"fmas", static_cast<int64_t>(m.cost.fmas)},
                                               {"bytes_per_s", static_cast<int64_t>(m.rates.bytes_per_s)},
                                               {"fma_per_s", static_cast<int64_t>(m.rates.fma_per_s)}})));
    std::fflush(stdout);
}

}  // namespace

Status bench_engine_on_cpu(const BenchEngineArguments& arguments) {
    Result<ModelBundle> bundle = make_model(arguments.setup);
    if (!bundle.ok()) {
        return bundle.status();
    }
    const int64_t longest = arguments.longest_sequence();
    if (longest > bundle->config.max_position_embeddings) {
        return invalid_argument(fmt::format("{} tokens are more than the model's context of {}", longest,
                                            bundle->config.max_position_embeddings));
    }
    Result<EngineBench::Memory> memory = EngineBench::allocate(*bundle, arguments);
    if (!memory.ok()) {
        return memory.status();
    }
    const double ready_s = seconds(now_ns() - arguments.started);
    const Result<ModelFacts> facts = load_facts(arguments.setup.folder);
    if (!facts.ok()) {
        return facts.status();
    }
    const Report report{.dtype = fmt::format("float32 over {}{}, {} KV", dtype_name(facts->projections),
                                             facts->int4_experts ? " and int4 experts" : "",
                                             dtype_name(bundle->model->page_format().kv_dtype)),
                        .ready_s = ready_s,
                        .threads = bundle->threads->size(),
                        .json = arguments.json};
    EngineBench bench(*bundle, arguments, *facts, memory.take());
    std::fprintf(stderr, "%-8s %6s %8s %12s %12s %12s %10s %10s %10s\n", "phase", "batch", "tokens",
                 "tokens/s", "us", "floor us", "of floor", "GFMA/s", "GB/s");
    for (const int32_t tokens : arguments.prompt_tokens) {
        print_line(bench.prefill(tokens), report);
    }
    for (const int32_t context : arguments.contexts) {
        for (const int32_t batch : arguments.batches) {
            print_line(bench.decode(batch, context), report);
        }
    }
    std::fprintf(stderr, "ready after %.3f s, %.1f MB resident\n", report.ready_s,
                 static_cast<double>(resident_bytes()) * 1e-6);
    return {};
}

}  // namespace tessera

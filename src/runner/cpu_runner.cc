#include "runner/cpu_runner.h"

#include <cstring>
#include <fmt/format.h>
#include <thread>
#include <utility>

#include "base/bounded_queue.h"
#include "base/check.h"
#include "device/host_buffer.h"
#include "ops/sample/sample.h"
#include "runner/generated_token.h"
#include "runner/slot_table.h"

namespace tessera {
namespace {

constexpr int kMaxInFlight = 2;

// One row of the sampler and the slot whose token it makes.
struct SampledRow {
    Slot* slot = nullptr;
    size_t result_row = 0;
};

SampleRowArgs sample_args(const Slot& slot, const float* logits) {
    const SamplingParams& params = slot.sampling;
    SampleRowArgs args;
    args.logits = logits;
    args.temperature = static_cast<float>(params.temperature);
    args.top_k = params.top_k;
    args.top_p = static_cast<float>(params.top_p);
    args.min_p = static_cast<float>(params.min_p);
    args.repetition_penalty = static_cast<float>(params.repetition_penalty);
    args.presence_penalty = static_cast<float>(params.presence_penalty);
    args.frequency_penalty = static_cast<float>(params.frequency_penalty);
    args.prompt_seen = slot.prompt_seen.empty() ? nullptr : slot.prompt_seen.data();
    args.output_counts = slot.output_counts.empty() ? nullptr : slot.output_counts.data();
    if (slot.outputs < params.min_tokens) {
        args.masked = slot.stop_ids;
    }
    args.logit_bias = params.logit_bias;
    args.seed = params.seed;
    args.position = static_cast<uint64_t>(slot.outputs);
    args.forced_token = slot.forced_token();
    args.logprobs = params.logprobs.has_value();
    args.top = params.logprobs.value_or(0);
    return args;
}

struct CpuRunnerMemory {
    HostBuffer pool;
    HostBuffer logits;  // [max_num_seqs, vocab]
    SampleWorkspace sampling;
};

class CpuRunner final : public Runner {
  public:
    CpuRunner(Hy3Model& model, ThreadPool& threads, const CpuRunnerConfig& config, CpuRunnerMemory memory)
        : model_(model),
          context_{threads},
          config_(config),
          slots_(config.max_num_seqs, model.config().vocab_size),
          memory_(std::move(memory)),
          plans_(kMaxInFlight),
          results_(kMaxInFlight),
          thread_([this] { work(); }) {}

    ~CpuRunner() override {
        plans_.close();
        thread_.join();
    }

    void launch(StepPlan plan) override {
        check(plans_.try_push(std::move(plan)), "runner: more plans in flight than max_in_flight()");
    }

    StepResult collect() override {
        std::optional<StepResult> result = results_.pop();
        check(result.has_value(), "runner: collect() without a plan");
        return std::move(*result);
    }

    int max_in_flight() const override { return kMaxInFlight; }

  private:
    void work() {
        while (std::optional<StepPlan> plan = plans_.pop()) {
            check(results_.try_push(execute(*plan)), "runner: results are not collected");
        }
    }

    StepResult execute(const StepPlan& plan) {
        StepResult result;
        result.step = plan.step;
        result.started = now_ns();
        for (const SlotId slot : plan.retired) {
            slots_.retire(slot);
        }
        for (const SlotInit& init : plan.inits) {
            slots_.init(init);
        }
        gather(plan, result);
        if (!tokens_.empty()) {
            const ForwardBatch batch{.tokens = tokens_,
                                     .sequences = sequences_,
                                     .logit_rows = logit_rows_,
                                     .pool = {memory_.pool.data(), model_.page_format().page_bytes()}};
            model_.forward(batch, {.logits = memory_.logits.as<float>(), .hidden = nullptr});
            for (size_t i = 0; i < sequences_.size(); ++i) {
                entered_[i]->length += sequences_[i].q_len;
            }
            sample_rows(result);
        }
        result.finished = now_ns();
        return result;
    }

    // The plan's rows as one batch: tokens, sequences and the rows whose logits are wanted.
    void gather(const StepPlan& plan, StepResult& result) {
        tokens_.clear();
        sequences_.clear();
        logit_rows_.clear();
        entered_.clear();
        sampled_.clear();
        for (const StepRow& row : plan.rows) {
            Slot& slot = slots_.enter(row);
            if (config_.poison) {
                poison(slot, row);
            }
            const auto first = static_cast<int32_t>(tokens_.size());
            if (row.kind == RowKind::kDecode) {
                tokens_.push_back(slot.last_token);
            } else {
                tokens_.insert(tokens_.end(), row.tokens.begin(), row.tokens.end());
            }
            const auto q_len = static_cast<int32_t>(tokens_.size()) - first;
            sequences_.push_back(
                {.first = first, .q_len = q_len, .position = slot.length, .pages = slot.pages});
            entered_.push_back(&slot);
            if (row.kind != RowKind::kPrefill) {
                logit_rows_.push_back(first + q_len - 1);
                sampled_.push_back({&slot, result.rows.size()});
            }
            result.rows.push_back(
                {.slot = row.slot, .generation = row.generation, .tokens = {}, .error = {}});
        }
    }

    // Pages that hold nothing yet must not be read: NaN in them would reach the output.
    void poison(const Slot& slot, const StepRow& row) {
        const auto first_unwritten = static_cast<size_t>((slot.length + kPageTokens - 1) / kPageTokens);
        const auto added = static_cast<size_t>(row.page_table_length);
        for (size_t i = std::max(first_unwritten, added); i < slot.pages.size(); ++i) {
            const int64_t bytes = model_.page_format().page_bytes();
            std::memset(memory_.pool.data() + slot.pages[i] * bytes, 0xFF, static_cast<size_t>(bytes));
        }
    }

    void sample_rows(StepResult& result) {
        const auto vocab = static_cast<size_t>(model_.config().vocab_size);
        sample_args_.clear();
        for (size_t i = 0; i < sampled_.size(); ++i) {
            sample_args_.push_back(sample_args(*sampled_[i].slot, memory_.logits.as<float>() + i * vocab));
        }
        sample_results_.assign(sample_args_.size(), SampleRowResult());
        run_sampler(sample_args_, sample_results_);
        for (size_t i = 0; i < sampled_.size(); ++i) {
            Slot& slot = *sampled_[i].slot;
            SampleRowResult& sampled = sample_results_[i];
            if (sampled.error == SampleError::kNone && slot.stops_early(sampled.token)) {
                sample_args_[i].forced_token = slot.sampling.forced.after;
                run_sampler(std::span(&sample_args_[i], 1), std::span(&sampled, 1));
            }
            RowResult& row = result.rows[sampled_[i].result_row];
            if (sampled.error != SampleError::kNone) {
                row.error = sample_error_name(sampled.error);
                continue;  // the slot keeps its last token: a row in flight for it computes something,
                           // ignored
            }
            row.tokens.push_back(generated_token(sampled, slot.sampling.logprobs.has_value()));
            slot.append_output(sampled.token);
        }
    }

    void run_sampler(std::span<const SampleRowArgs> rows, std::span<SampleRowResult> results) {
        sample(context_, {.vocab = model_.config().vocab_size,
                          .rows = rows,
                          .results = results,
                          .workspace = &memory_.sampling});
    }

    Hy3Model& model_;
    OpContext context_;
    const CpuRunnerConfig config_;
    SlotTable slots_;  // this and the buffers below: the compute thread's
    CpuRunnerMemory memory_;
    std::vector<TokenId> tokens_;
    std::vector<SequenceSpan> sequences_;
    std::vector<Slot*> entered_;
    std::vector<int32_t> logit_rows_;
    std::vector<SampledRow> sampled_;
    std::vector<SampleRowArgs> sample_args_;
    std::vector<SampleRowResult> sample_results_;
    BoundedQueue<StepPlan> plans_;
    BoundedQueue<StepResult> results_;
    std::thread thread_;
};

}  // namespace

Result<std::unique_ptr<Runner>> make_cpu_runner(Hy3Model& model, ThreadPool& threads,
                                                const CpuRunnerConfig& config) {
    check(config.num_pages >= 1 && config.max_num_seqs >= 1, "runner: no pages or no slots");
    Result<HostBuffer> pool = HostBuffer::allocate(config.num_pages * model.page_format().page_bytes(),
                                                   fmt::format("the KV cache of {} pages", config.num_pages),
                                                   "lower --kv-cache-memory-bytes or --max-model-len");
    if (!pool.ok()) {
        return pool.status();
    }
    const int64_t vocab = model.config().vocab_size;
    Result<HostBuffer> logits = HostBuffer::allocate(
        config.max_num_seqs * vocab * 4, fmt::format("the logits of {} sequences", config.max_num_seqs),
        "lower --max-num-seqs");
    if (!logits.ok()) {
        return logits.status();
    }
    Result<SampleWorkspace> sampling = SampleWorkspace::create(vocab, threads.size());
    if (!sampling.ok()) {
        return sampling.status();
    }
    return std::unique_ptr<Runner>(std::make_unique<CpuRunner>(
        model, threads, config, CpuRunnerMemory{pool.take(), logits.take(), sampling.take()}));
}

}  // namespace tessera

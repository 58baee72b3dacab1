#include "runner/cuda/cuda_runner.h"

#include <algorithm>
#include <array>
#include <deque>
#include <fmt/format.h>
#include <map>
#include <numeric>

#include "base/check.h"
#include "base/clock.h"
#include "base/median.h"
#include "device/cuda/cuda_check.h"
#include "device/cuda/graph.h"
#include "device/cuda/stream.h"
#include "model/cuda/device_forward.h"
#include "model/cuda/random_fill.h"
#include "runner/cuda/prepare_step.h"
#include "runner/cuda/slot_upload.h"
#include "runner/cuda/step_memory.h"
#include "runner/generated_token.h"
#include "runner/slot_table.h"

namespace tessera {
namespace {

constexpr int kMaxInFlight = 2;
// Left for the captured steps when the KV pool takes all that there is.
constexpr int64_t kGraphReserve = int64_t{512} << 20;

void copy_to_device(cudaStream_t stream, void* to, const void* from, int64_t bytes) {
    cuda_check(cudaMemcpyAsync(to, from, static_cast<size_t>(bytes), cudaMemcpyHostToDevice, stream));
}

// The batch sizes that decode steps are captured for: at most 1/4 more rows than asked for from 16 on.
std::vector<int32_t> graph_sizes(int32_t rows_max) {
    std::vector<int32_t> sizes;
    for (int32_t size = 1; size < rows_max; size += size < 8 ? size : size < 64 ? 8 : size < 256 ? 16 : 32) {
        sizes.push_back(size);
    }
    sizes.push_back(rows_max);
    return sizes;
}

// A row in flight, in the plan's order.
struct PendingRow {
    SlotId slot = 0;
    uint32_t generation = 0;
    int32_t result = -1;  // index of its sampler result; -1: none is made
    bool logprobs = false;
    std::string error;
};

struct PendingStep {
    uint64_t step = 0;
    std::vector<PendingRow> rows;
};

// The counts of a step being put together.
struct StepShape {
    int32_t rows = 0, decode_rows = 0, tokens = 0, logits = 0, new_pages = 0;
};

class CudaRunnerImpl final : public CudaRunner {
  public:
    CudaRunnerImpl(CudaModel& model, const CudaRunnerConfig& config)
        : forward_(model.device()),
          budget_(model.budget()),
          config_(config),
          sizes_{config.max_num_seqs, config.max_num_batched_tokens, forward_.pages_max(),
                 model.config().vocab_size},
          slots_(config.max_num_seqs, model.config().vocab_size),
          slot_errors_(static_cast<size_t>(config.max_num_seqs)) {}

    ~CudaRunnerImpl() override { stream_.synchronize(); }

    Status open();
    int32_t num_pages() const override { return num_pages_; }
    void launch(StepPlan plan) override;
    StepResult collect() override;
    StepTiming last_timing() const override { return last_timing_; }
    void fill_pages(uint64_t seed) override;
    Result<StepProbe> probe(int32_t replays) override;
    int max_in_flight() const override { return kMaxInFlight; }

  private:
    Status allocate_pool();
    Status capture_decode_steps();
    void init_slots(const StepPlan& plan);
    void upload_slots(const StepPlan& plan, StepStaging& staging);
    void stage_row(const StepRow& row, StepStaging& staging, StepShape& shape, PendingRow& pending);
    PendingStep stage_rows(const StepPlan& plan, StepStaging& staging, StepShape& shape);
    void pad_rows(StepStaging& staging, const StepShape& shape, int32_t rows) const;
    void poison(const Slot& slot, const StepRow& row);
    void copy_inputs(const StepStaging& staging, const StepShape& shape);
    void prepare(const StepShape& shape);
    void enter_step(const StepShape& shape);
    static StepShape decode_shape(int32_t rows) {
        return {.rows = rows, .decode_rows = rows, .tokens = rows, .logits = rows};
    }
    template <typename F>
    Graph capture_last_step(PassObserver* observer, F&& before);
    template <typename F>
    double replay(const Graph& graph, int32_t replays, F&& after);

    DeviceForward& forward_;
    MemoryBudget& budget_;
    const CudaRunnerConfig config_;
    const StepSizes sizes_;
    // The host's view of the slots. What the sampler changes (last token, outputs, forced tokens) is as it
    // was at init; the device has the truth.
    SlotTable slots_;
    std::vector<std::string> slot_errors_;  // by slot: why its rows cannot be sampled
    Stream stream_;
    StepMemory memory_;
    DeviceBuffer pool_;
    int32_t num_pages_ = 0;
    std::array<StepStaging, kMaxInFlight> staging_;  // of step i: [i % 2]
    StepClock clock_;
    StepTiming last_timing_;
    StepShape last_shape_;             // as launched, empty rows included
    std::map<int32_t, Graph> graphs_;  // by rows
    std::deque<PendingStep> pending_;
    uint64_t launched_ = 0;
    uint64_t collected_ = 0;
};

Status CudaRunnerImpl::open() {
    Result<StepMemory> memory = StepMemory::allocate(sizes_, budget_);
    if (!memory.ok()) {
        return memory.status();
    }
    memory_ = memory.take();
    for (StepStaging& staging : staging_) {
        Result<StepStaging> made = StepStaging::allocate(sizes_);
        if (!made.ok()) {
            return made.status();
        }
        staging = made.take();
    }
    if (Status status = allocate_pool(); !status.ok()) {
        return status;
    }
    cuda_check(cudaDeviceSynchronize());
    return capture_decode_steps();
}

Status CudaRunnerImpl::allocate_pool() {
    const int64_t page_bytes = forward_.page_format().page_bytes();
    int64_t pages = config_.num_pages;
    if (pages == 0) {
        const int64_t room = budget_.available() - kGraphReserve;
        pages = std::clamp<int64_t>(room / page_bytes, 0, INT32_MAX);
        if (pages < 1) {
            return resource_exhausted(fmt::format(
                "no device memory is left for KV pages: {} of {} are taken by weights and workspaces. Raise "
                "--gpu-memory-utilization, or lower --max-num-batched-tokens or --max-num-seqs",
                format_bytes(budget_.used()), format_bytes(budget_.limit())));
        }
    }
    Result<DeviceBuffer> pool =
        DeviceBuffer::allocate(budget_, MemoryCategory::kKvPool, "KV pages", pages * page_bytes);
    if (!pool.ok()) {
        return pool.status();
    }
    pool_ = pool.take();
    num_pages_ = static_cast<int32_t>(pages);
    return {};
}

Status CudaRunnerImpl::capture_decode_steps() {
    size_t free_before = 0;
    size_t free_after = 0;
    size_t total = 0;
    cuda_check(cudaMemGetInfo(&free_before, &total));
    for (const int32_t rows : graph_sizes(config_.max_num_seqs)) {
        // Once as launches, over empty rows: plans are chosen and kernels loaded outside the capture.
        pad_rows(staging_[0], {}, rows);
        copy_inputs(staging_[0], {.rows = rows, .decode_rows = rows});
        enter_step(decode_shape(rows));
        stream_.synchronize();
        graphs_[rows] = Graph::capture(stream_.get(), [&] { enter_step(decode_shape(rows)); });
    }
    stream_.synchronize();
    cuda_check(cudaMemGetInfo(&free_after, &total));
    const auto taken = static_cast<int64_t>(free_before) - static_cast<int64_t>(free_after);
    const Status status =
        budget_.reserve(MemoryCategory::kGraphs, "decode steps", std::max<int64_t>(taken, 0)).status();
    if (!status.ok()) {  // the driver tells only what is free, and graphs of a model take some MiB
        return resource_exhausted(
            fmt::format("{}. What another process took while decode steps were captured is counted with "
                        "them: start again when no other process begins on this device",
                        status.message()));
    }
    return {};
}

void CudaRunnerImpl::launch(StepPlan plan) {
    check(pending_.size() < kMaxInFlight, "runner: more plans in flight than max_in_flight()");
    use_device(forward_.device());
    const ProfileRange range("launch step");
    const size_t parity = launched_++ % kMaxInFlight;
    StepStaging& staging = staging_[parity];
    StepShape shape;
    {
        const ProfileRange stage("stage inputs");
        init_slots(plan);
        pending_.push_back(stage_rows(plan, staging, shape));
    }
    clock_.begin(stream_.get());
    upload_slots(plan, staging);
    if (shape.rows > 0) {
        const auto graph = graphs_.lower_bound(shape.rows);
        if (shape.decode_rows == shape.rows && graph != graphs_.end()) {
            pad_rows(staging, shape, graph->first);
            copy_inputs(staging, shape);
            graph->second.launch(stream_.get());
            last_shape_ = decode_shape(graph->first);
        } else {
            copy_inputs(staging, shape);
            enter_step(shape);
            last_shape_ = shape;
        }
        cuda_check(cudaMemcpyAsync(staging.results, memory_.results,
                                   static_cast<size_t>(shape.logits) * sizeof(SampleRowResult),
                                   cudaMemcpyDeviceToHost, stream_.get()));
    }
    clock_.end(stream_.get());
}

StepResult CudaRunnerImpl::collect() {
    check(!pending_.empty(), "runner: collect() without a plan");
    const size_t parity = collected_++ % kMaxInFlight;
    {
        const ProfileRange range("wait for step");
        last_timing_ = clock_.wait();
    }
    const PendingStep step = std::move(pending_.front());
    pending_.pop_front();
    StepResult result;
    result.step = step.step;
    result.finished = now_ns();
    result.started = result.finished - static_cast<TimeNs>(last_timing_.busy_us * 1e3);
    for (const PendingRow& row : step.rows) {
        RowResult out{.slot = row.slot, .generation = row.generation, .tokens = {}, .error = row.error};
        if (out.error.empty() && row.result >= 0) {
            const SampleRowResult& sampled = staging_[parity].results[row.result];
            if (sampled.error != SampleError::kNone) {
                out.error = sample_error_name(sampled.error);
            } else {
                out.tokens.push_back(generated_token(sampled, row.logprobs));
            }
        }
        result.rows.push_back(std::move(out));
    }
    return result;
}

void CudaRunnerImpl::init_slots(const StepPlan& plan) {
    for (const SlotId slot : plan.retired) {
        slots_.retire(slot);
    }
    for (const SlotInit& init : plan.inits) {
        slots_.init(init);
        slot_errors_[static_cast<size_t>(init.slot)] = tenant_too_large(init);
    }
}

// After the rows have been staged: of a slot's state they change only length and pages, which the device has
// from the step's inputs.
void CudaRunnerImpl::upload_slots(const StepPlan& plan, StepStaging& staging) {
    staging.count = 0;
    staging.history_used = 0;
    const TenantUpload upload{.stream = stream_, .sizes = sizes_, .memory = memory_, .staging = staging};
    for (const SlotInit& init : plan.inits) {
        if (slot_errors_[static_cast<size_t>(init.slot)].empty()) {
            upload.enter(init, sample_slot(slots_.at(init.slot)));
        }
    }
}

// Decode rows come first in the batch; results keep the plan's order.
PendingStep CudaRunnerImpl::stage_rows(const StepPlan& plan, StepStaging& staging, StepShape& shape) {
    check(plan.rows.size() <= static_cast<size_t>(sizes_.rows), "runner: more rows than slots");
    PendingStep pending{.step = plan.step, .rows = std::vector<PendingRow>(plan.rows.size())};
    for (const bool decode : {true, false}) {
        for (size_t i = 0; i < plan.rows.size(); ++i) {
            if ((plan.rows[i].kind == RowKind::kDecode) == decode) {
                stage_row(plan.rows[i], staging, shape, pending.rows[i]);
            }
        }
    }
    staging.inputs.first_tokens[shape.rows] = shape.tokens;
    staging.inputs.first_new_pages[shape.rows] = shape.new_pages;
    for (int32_t i = shape.decode_rows; i <= shape.rows; ++i) {
        staging.inputs.prefill_first_rows[i - shape.decode_rows] =
            staging.inputs.first_tokens[i] - shape.decode_rows;
    }
    return pending;
}

void CudaRunnerImpl::stage_row(const StepRow& row, StepStaging& staging, StepShape& shape,
                               PendingRow& pending) {
    const StepInputs& inputs = staging.inputs;
    Slot& slot = slots_.enter(row);
    check(row.draft_count == 0, "runner: the CUDA backend has no drafts");
    check(slot.pages.size() <= static_cast<size_t>(sizes_.pages),
          "runner: a page table longer than the context");
    if (config_.poison) {
        poison(slot, row);
    }
    const bool decode = row.kind == RowKind::kDecode;
    const int32_t count = decode ? 1 : static_cast<int32_t>(row.tokens.size());
    check(shape.tokens + count <= sizes_.tokens, "runner: more tokens than the model's batch");
    inputs.slots[shape.rows] = row.slot;
    inputs.positions[shape.rows] = slot.length;
    inputs.first_tokens[shape.rows] = shape.tokens;
    inputs.table_lengths[shape.rows] = row.page_table_length;
    inputs.first_new_pages[shape.rows] = shape.new_pages;
    std::copy(row.new_pages.begin(), row.new_pages.end(), inputs.new_pages + shape.new_pages);
    shape.new_pages += static_cast<int32_t>(row.new_pages.size());
    if (!decode) {
        std::copy(row.tokens.begin(), row.tokens.end(),
                  inputs.prefill_tokens + shape.tokens - shape.decode_rows);
    }
    shape.tokens += count;
    slot.length += count;
    pending.slot = row.slot;
    pending.generation = row.generation;
    if (row.kind != RowKind::kPrefill) {
        pending.error = slot_errors_[static_cast<size_t>(row.slot)];
        pending.logprobs = slot.sampling.logprobs.has_value();
        pending.result = shape.logits;
        inputs.logit_rows[shape.logits] = shape.tokens - 1;
        inputs.sample_slots[shape.logits] = pending.error.empty() ? row.slot : -1;
        ++shape.logits;
    }
    ++shape.rows;
    shape.decode_rows += decode ? 1 : 0;
}

// Empty rows up to `rows`.
void CudaRunnerImpl::pad_rows(StepStaging& staging, const StepShape& shape, int32_t rows) const {
    for (int32_t i = shape.rows; i < rows; ++i) {
        staging.inputs.slots[i] = -1;
        staging.inputs.sample_slots[i] = -1;
        staging.inputs.positions[i] = -1;
        staging.inputs.table_lengths[i] = 0;
        staging.inputs.first_tokens[i + 1] = i + 1;
        staging.inputs.first_new_pages[i + 1] = shape.new_pages;
    }
}

// Pages that hold nothing yet must not be read: NaN in them would reach the output.
void CudaRunnerImpl::poison(const Slot& slot, const StepRow& row) {
    const auto first_unwritten = static_cast<size_t>((slot.length + kPageTokens - 1) / kPageTokens);
    const auto added = static_cast<size_t>(row.page_table_length);
    const int64_t bytes = forward_.page_format().page_bytes();
    for (size_t i = std::max(first_unwritten, added); i < slot.pages.size(); ++i) {
        cuda_check(cudaMemsetAsync(pool_.data() + slot.pages[i] * bytes, 0xFF, static_cast<size_t>(bytes),
                                   stream_.get()));
    }
}

void CudaRunnerImpl::copy_inputs(const StepStaging& staging, const StepShape& shape) {
    const StepInputs& from = staging.inputs;
    const StepInputs& to = memory_.inputs;
    copy_to_device(stream_.get(), to.slots, from.slots, 4 * from.row_words);
    if (shape.new_pages > 0) {
        copy_to_device(stream_.get(), to.new_pages, from.new_pages, int64_t{4} * shape.new_pages);
    }
    if (const int64_t tokens = shape.tokens - shape.decode_rows; tokens > 0) {
        copy_to_device(stream_.get(), to.prefill_tokens, from.prefill_tokens, 4 * tokens);
    }
}

// What the rows become once their slots' state is known.
void CudaRunnerImpl::prepare(const StepShape& shape) {
    const PassSection section = forward_.section(stream_.get(), PassOperator::kPrepare);
    const StepInputs& inputs = memory_.inputs;
    prepare_step_cuda(stream_.get(), {.rows = shape.rows,
                                      .decode_rows = shape.decode_rows,
                                      .pages_max = sizes_.pages,
                                      .slots = inputs.slots,
                                      .positions = inputs.positions,
                                      .first_tokens = inputs.first_tokens,
                                      .table_lengths = inputs.table_lengths,
                                      .first_new_pages = inputs.first_new_pages,
                                      .new_pages = inputs.new_pages,
                                      .prefill_tokens = inputs.prefill_tokens,
                                      .last_tokens = memory_.samples.last_token,
                                      .slot_tables = memory_.slot_tables,
                                      .tokens = memory_.tokens,
                                      .token_positions = memory_.token_positions,
                                      .token_rows = memory_.token_rows,
                                      .row_tables = memory_.row_tables});
}

// The launches of one step. Those of decode rows alone depend on nothing but their number.
void CudaRunnerImpl::enter_step(const StepShape& shape) {
    const StepInputs& inputs = memory_.inputs;
    prepare(shape);
    forward_.forward(stream_.get(), {.tokens_count = shape.tokens,
                                     .decode_rows = shape.decode_rows,
                                     .prefill_rows = shape.rows - shape.decode_rows,
                                     .logit_count = shape.logits,
                                     .tokens = memory_.tokens,
                                     .positions = memory_.token_positions,
                                     .sequences = memory_.token_rows,
                                     .first_positions = inputs.positions,
                                     .prefill_first_rows = inputs.prefill_first_rows,
                                     .page_tables = memory_.row_tables,
                                     .logit_rows = shape.logits == shape.tokens ? nullptr : inputs.logit_rows,
                                     .pool = pool_.data()});
    if (shape.logits > 0) {
        const PassSection section = forward_.section(stream_.get(), PassOperator::kSample);
        sample_cuda(stream_.get(), {.logits = forward_.logits(),
                                    .logits_stride = sizes_.vocab,
                                    .vocab = sizes_.vocab,
                                    .rows = shape.logits,
                                    .row_slots = inputs.sample_slots,
                                    .slots = memory_.samples,
                                    .exchange = memory_.sample_exchange,
                                    .sm_count = forward_.device().sm_count,
                                    .results = memory_.results});
    }
}

void CudaRunnerImpl::fill_pages(uint64_t seed) {
    const DType dtype = forward_.page_format().kv_dtype;
    // Values near 1, as normed keys are; e4m3 pages hold them over a scale of about 5 / 448.
    random_fill_cuda(stream_.get(), {.to = pool_.data(),
                                     .count = pool_.bytes() / dtype_size(dtype),
                                     .dtype = dtype,
                                     .seed = seed,
                                     .deviation = dtype == DType::kFloat8E4M3 ? 90.0f : 1.0f});
    stream_.synchronize();
}

template <typename F>
Graph CudaRunnerImpl::capture_last_step(PassObserver* observer, F&& before) {
    forward_.observe(observer);
    Graph graph = Graph::capture(stream_.get(), [&] {
        before();
        enter_step(last_shape_);
    });
    forward_.observe(nullptr);
    return graph;
}

// Median us of a replay after the first; `after` follows each, the first too.
template <typename F>
double CudaRunnerImpl::replay(const Graph& graph, int32_t replays, F&& after) {
    Event begin(Event::Timing::kOn);
    Event end(Event::Timing::kOn);
    std::vector<double> us;
    for (int32_t i = 0; i <= replays; ++i) {
        begin.record(stream_.get());
        graph.launch(stream_.get());
        end.record(stream_.get());
        end.wait();
        if (i > 0) {
            us.push_back(Event::elapsed_us(begin, end));
        }
        after();
    }
    return median(us);
}

Result<StepProbe> CudaRunnerImpl::probe(int32_t replays) {
    check(pending_.empty() && last_shape_.rows > 0, "runner: probe() needs a step and nothing in flight");
    const ModelConfig& config = forward_.config();
    Result<ExpertCounter> experts = ExpertCounter::create(config.num_layers, config.num_experts);
    if (!experts.ok()) {
        return experts.status();
    }
    StepProbe out;
    out.step_us = replay(capture_last_step(nullptr, [] {}), replays, [] {});

    OperatorTimer timer;
    const Graph timed = capture_last_step(&timer, [&] { timer.begin(stream_.get()); });
    std::array<std::vector<double>, kPassOperators> times;
    out.marked_us = replay(timed, replays, [&] {
        const OperatorTimes us = timer.times();
        for (size_t op = 0; op < kPassOperators; ++op) {
            times[op].push_back(us[op]);
        }
    });
    std::transform(times.begin(), times.end(), out.operators.begin(), median);

    const Graph counted = capture_last_step(&*experts, [] {});
    std::vector<int64_t> touched;
    replay(counted, replays, [&] { touched.push_back(experts->take()); });
    const auto sum = std::accumulate(touched.begin(), touched.end(), int64_t{0});
    out.experts_touched = static_cast<double>(sum) / static_cast<double>(touched.size());
    return out;
}

}  // namespace

Result<std::unique_ptr<CudaRunner>> CudaRunner::create(CudaModel& model, const CudaRunnerConfig& config) {
    const DeviceForwardOptions& options = model.device().options();
    check(config.max_num_seqs >= 1 && config.max_num_seqs <= options.sequences_max &&
              config.max_num_seqs <= options.logit_rows_max &&
              config.max_num_seqs <= config.max_num_batched_tokens &&
              config.max_num_batched_tokens <= options.tokens_max,
          "runner: its steps are larger than the model's");
    auto runner = std::make_unique<CudaRunnerImpl>(model, config);
    if (Status status = runner->open(); !status.ok()) {
        return status;
    }
    model.budget().seal();
    return std::unique_ptr<CudaRunner>(std::move(runner));
}

}  // namespace tessera

// The cases of sample on the device: the rows of the CPU backend's cases, which must give the same tokens.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstring>

#include "device/cuda/device_props.h"
#include "ops/cuda/cuda_case.h"
#include "ops/sample/cuda/sample_cuda.h"
#include "ops/sample/cuda/sample_few.h"
#include "ops/sample/sample_cases.h"
#include "ops/sample/sample_distribution.h"

namespace tessera {

// The device's slots and rows, made from rows of the CPU operator. Row i has slot rows - 1 - i.
class SampleCudaCase {
  public:
    SampleCudaCase(const CudaCaseData& data, std::shared_ptr<SampleCase> host)
        : host_(std::move(host)), vocab_(host_->vocab()), rows_(static_cast<int64_t>(host_->rows().size())) {
        const size_t rows = static_cast<size_t>(rows_);
        slots_.resize(rows);
        seen_.resize(rows * seen_words());
        output_seen_.resize(rows * seen_words());
        output_often_.resize(rows * seen_words());
        counts_.resize(rows * static_cast<size_t>(vocab_));
        bias_ids_.resize(rows * kSampleBiasMax);
        bias_values_.resize(rows * kSampleBiasMax);
        forced_.resize(rows * kSampleForcedMax);
        allowed_.resize(rows * allowed_words(), 0xFFFFFFFFu);
        std::vector<float> logits;
        for (size_t r = 0; r < rows; ++r) {
            fill_slot(host_->rows()[r], r, rows - 1 - r);
            logits.insert(logits.end(), host_->rows()[r].logits, host_->rows()[r].logits + vocab_);
            row_slots_.push_back(static_cast<int32_t>(rows - 1 - r));
        }
        tessera::check(sample_cuda_prepare(vocab_).ok(), "sample: the vocabulary is too large");
        const Result<DeviceProps> device = open_device(0);
        tessera::check(device.ok(), "no device");
        sm_count_ = device->sm_count;
        upload(data, logits);
    }

    SampleCudaArgs args(int set) {
        return {.logits = d_logits_->at(set),
                .logits_stride = vocab_,
                .vocab = vocab_,
                .rows = rows_,
                .row_slots = d_row_slots_->at(0),
                .allowed = allowed_used_ ? d_allowed_->at(0) : nullptr,
                .slots = {d_slots_->at(0), d_seen_->at(0), d_output_seen_->at(0), d_output_often_->at(0),
                          d_counts_->at(0), d_bias_ids_->at(0), d_bias_values_->at(0), d_forced_->at(0),
                          d_last_->at(0)},
                .exchange = d_exchange_->at(0),
                .sm_count = sm_count_,
                .results = d_results_->at(0)};
    }
    void launch(cudaStream_t stream, int set) { sample_cuda(stream, args(set)); }

    // Takes the histories back to what they were.
    void reset_histories() {
        d_counts_->upload(counts_);
        d_output_seen_->upload(output_seen_);
        d_output_often_->upload(output_often_);
    }
    OpError check(cudaStream_t stream) {
        d_slots_->upload(slots_);
        reset_histories();
        d_last_->poison();
        d_results_->poison();
        launch(stream, 0);
        const std::vector<SampleRowResult> got = d_results_->download();
        sample_ref(host_->args());
        OpError error = compare_close(flatten(got), flatten(host_->results()), 4e-6, 0);
        error += check_slots(got);
        return error;
    }
    // What the kernel for few rows needs to find so.
    bool exchange_is_clear() const {
        const std::vector<std::byte> bytes = d_exchange_->download();
        const auto end = bytes.begin() + sample_few_exchange_bytes(vocab_, kSampleFewRows);
        return std::all_of(bytes.begin(), end, [](std::byte b) { return b == std::byte{0}; });
    }
    std::vector<SampleRowResult> results() const { return d_results_->download(); }
    DeviceArray<SampleSlot>& slots() { return *d_slots_; }
    std::vector<SampleSlot>& host_slots() { return slots_; }

  private:
    size_t seen_words() const { return static_cast<size_t>((vocab_ + 63) / 64); }
    size_t allowed_words() const { return static_cast<size_t>((vocab_ + 31) / 32); }

    void fill_slot(const SampleRowArgs& row, size_t r, size_t slot_id) {
        SampleSlot& slot = slots_[slot_id];
        slot.seed = row.seed;
        slot.temperature = row.temperature;
        slot.top_p = row.top_p;
        slot.min_p = row.min_p;
        slot.repetition_penalty = row.repetition_penalty;
        slot.presence_penalty = row.presence_penalty;
        slot.frequency_penalty = row.frequency_penalty;
        slot.top_k = row.top_k;
        slot.outputs = static_cast<int32_t>(row.position);
        slot.logprobs = row.logprobs ? 1 : 0;
        slot.top = row.top;
        slot.stop_count = static_cast<int32_t>(row.masked.size());
        slot.min_tokens = row.masked.empty() ? 0 : slot.outputs + 1;
        std::copy(row.masked.begin(), row.masked.end(), slot.stop_ids);
        slot.bias_count = static_cast<int32_t>(row.logit_bias.size());
        for (size_t i = 0; i < row.logit_bias.size(); ++i) {
            bias_ids_[slot_id * kSampleBiasMax + i] = row.logit_bias[i].first;
            bias_values_[slot_id * kSampleBiasMax + i] = row.logit_bias[i].second;
        }
        if (row.forced_token >= 0) {
            slot.forced_count = 1;
            forced_[slot_id * kSampleForcedMax] = row.forced_token;
        }
        if (row.prompt_seen != nullptr) {
            std::copy_n(row.prompt_seen, seen_words(),
                        seen_.begin() + static_cast<int64_t>(slot_id * seen_words()));
        }
        if (row.output_counts != nullptr) {
            std::copy_n(row.output_counts, vocab_, counts_.begin() + static_cast<int64_t>(slot_id) * vocab_);
            for (size_t i = 0; i < static_cast<size_t>(vocab_); ++i) {
                const size_t word = slot_id * seen_words() + i / 64;
                output_seen_[word] |= uint64_t{row.output_counts[i] > 0} << (i % 64);
                output_often_[word] |= uint64_t{row.output_counts[i] > 1} << (i % 64);
            }
        }
        if (row.allowed != nullptr) {
            allowed_used_ = true;
            std::copy_n(row.allowed, allowed_words(),
                        allowed_.begin() + static_cast<int64_t>(r * allowed_words()));
        }
    }
    void upload(const CudaCaseData& data, const std::vector<float>& logits) {
        const size_t rows = static_cast<size_t>(rows_);
        d_logits_ = std::make_unique<DeviceArray<float>>(data.budget, logits, data.sets);
        d_row_slots_ = std::make_unique<DeviceArray<int32_t>>(data.budget, row_slots_, 1);
        d_allowed_ = std::make_unique<DeviceArray<uint32_t>>(data.budget, allowed_, 1);
        d_slots_ = std::make_unique<DeviceArray<SampleSlot>>(data.budget, slots_, 1);
        d_seen_ = std::make_unique<DeviceArray<uint64_t>>(data.budget, seen_, 1);
        d_output_seen_ = std::make_unique<DeviceArray<uint64_t>>(data.budget, output_seen_, 1);
        d_output_often_ = std::make_unique<DeviceArray<uint64_t>>(data.budget, output_often_, 1);
        d_counts_ = std::make_unique<DeviceArray<int32_t>>(data.budget, counts_, 1);
        d_bias_ids_ = std::make_unique<DeviceArray<int32_t>>(data.budget, bias_ids_, 1);
        d_bias_values_ = std::make_unique<DeviceArray<float>>(data.budget, bias_values_, 1);
        d_forced_ = std::make_unique<DeviceArray<int32_t>>(data.budget, forced_, 1);
        d_exchange_ = std::make_unique<DeviceArray<std::byte>>(
            data.budget,
            std::vector<std::byte>(static_cast<size_t>(sample_cuda_exchange_bytes(vocab_, rows_))), 1);
        d_last_ = std::make_unique<DeviceArray<int32_t>>(data.budget, std::vector<int32_t>(rows), 1);
        d_results_ = std::make_unique<DeviceArray<SampleRowResult>>(data.budget,
                                                                    std::vector<SampleRowResult>(rows), 1);
    }
    // The state was taken on by exactly the tokens made.
    OpError check_slots(const std::vector<SampleRowResult>& results) const {
        const std::vector<SampleSlot> slots = d_slots_->download();
        const std::vector<int32_t> counts = d_counts_->download();
        const std::vector<int32_t> last = d_last_->download();
        std::vector<float> got;
        std::vector<float> want;
        for (size_t r = 0; r < results.size(); ++r) {
            const size_t s = results.size() - 1 - r;
            const bool made = results[r].error == SampleError::kNone;
            const size_t token = made ? static_cast<size_t>(results[r].token) : 0;
            const size_t at = s * static_cast<size_t>(vocab_) + token;
            got.insert(got.end(), {static_cast<float>(slots[s].outputs), static_cast<float>(last[s]),
                                   static_cast<float>(counts[at])});
            want.insert(want.end(),
                        {static_cast<float>(slots_[s].outputs + (made ? 1 : 0)),
                         static_cast<float>(made ? results[r].token : -1),
                         static_cast<float>(counts_[at] + (made && slots_[s].has_penalties() ? 1 : 0))});
        }
        return compare_close(got, want, 0, 0);
    }

    std::shared_ptr<SampleCase> host_;
    int64_t vocab_, rows_;
    bool allowed_used_ = false;
    int sm_count_ = 0;
    std::vector<SampleSlot> slots_;
    std::vector<uint64_t> seen_, output_seen_, output_often_;
    std::vector<int32_t> counts_, bias_ids_, forced_, row_slots_;
    std::vector<float> bias_values_;
    std::vector<uint32_t> allowed_;
    std::unique_ptr<DeviceArray<float>> d_logits_, d_bias_values_;
    std::unique_ptr<DeviceArray<int32_t>> d_row_slots_, d_counts_, d_bias_ids_, d_forced_, d_last_;
    std::unique_ptr<DeviceArray<uint32_t>> d_allowed_;
    std::unique_ptr<DeviceArray<uint64_t>> d_seen_, d_output_seen_, d_output_often_;
    std::unique_ptr<DeviceArray<SampleSlot>> d_slots_;
    std::unique_ptr<DeviceArray<SampleRowResult>> d_results_;
    std::unique_ptr<DeviceArray<std::byte>> d_exchange_;
};

struct SampleCudaSpec {
    std::string name;
    int64_t vocab = 0;
    int64_t rows = 0;
    float spread = 0;  // of the logits
    SampleCase::Edit edit;
};

inline CudaOpCase sample_cuda_case(const SampleCudaSpec& spec, bool bench) {
    const int64_t bytes = spec.vocab * spec.rows * 4;
    return {"vocab=" + std::to_string(spec.vocab) + " rows=" + std::to_string(spec.rows) + " " + spec.name,
            "float32", bench,
            [=](const CudaCaseData& data) {
                auto host =
                    std::make_shared<SampleCase>(spec.vocab, spec.rows, spec.spread, spec.edit, data.seed);
                auto run = std::make_shared<SampleCudaCase>(data, std::move(host));
                return make_cuda_run(std::move(run), data.sets, {bytes, 0});
            },
            bytes};
}

// Rows that several thread blocks share.
inline std::vector<CudaOpCase> sample_few_cases() {
    const auto lists = [](SampleRowArgs& row, OpRandom& random, SampleCase& data) {
        row.temperature = 0.2f + random.uniform() * 0.1f;
        row.top_k = static_cast<int32_t>(1 + random.below(59));
        row.top_p = random.below(2) == 0 ? 0.9f : 1.0f;
        row.repetition_penalty = 1.1f;
        row.frequency_penalty = 0.1f;
        data.add_history(row, random);
    };
    // The best lie in few places, and many are equal.
    const auto dense = [lists](SampleRowArgs& row, OpRandom& random, SampleCase& data) {
        lists(row, random, data);
        auto* logits = const_cast<float*>(row.logits);
        for (int64_t from = random.below(2000), i = from; i < std::min(from + 3000, data.vocab()); ++i) {
            logits[i] = std::round(logits[i] * 8) / 8 + (random.below(9) == 0 ? 4.0f : 0.0f);
        }
    };
    const auto nucleus = [](SampleRowArgs& row, OpRandom& random, SampleCase&) {
        row.temperature = 0.2f;
        row.top_k = random.below(2) == 0 ? 0 : static_cast<int32_t>(60 + random.below(200));
        row.top_p = 0.3f + random.uniform() * 0.2f;
    };
    std::vector<CudaOpCase> cases;
    for (const int64_t rows : {1, 2, 4, 8}) {
        for (const int64_t vocab : {1, 31, 1000, 4098, 40001, 120832, 131072}) {
            cases.push_back(sample_cuda_case({"everything", vocab, rows, 5, edit_everything}, false));
        }
        cases.push_back(sample_cuda_case({"top_k up to 59, penalties", 120832, rows, 12, lists}, false));
        cases.push_back(sample_cuda_case({"equal neighbours", 120832, rows, 12, dense}, false));
        cases.push_back(sample_cuda_case({"top_p of a list", 120832, rows, 12, nucleus}, false));
    }
    return cases;
}

// Penalties that lower few or many of the best tokens, a little or by far.
inline void edit_to_seen_bests(SampleRowArgs& row, OpRandom& random, SampleCase& data) {
    row.temperature = 0.05f + random.uniform() * 0.05f;
    row.top_k = static_cast<int32_t>(1 + random.below(110));
    row.top_p = random.below(2) == 0 ? 0.9f : 1.0f;
    row.min_p = random.below(4) == 0 ? 0.1f : 0.0f;
    row.repetition_penalty = random.below(2) == 0 ? 1.1f : 1.0002f;
    row.frequency_penalty = random.below(2) == 0 ? 0.01f : 0.0f;
    row.presence_penalty = random.below(2) == 0 ? 0.002f : 0.0f;
    data.add_history(row, random);
    std::vector<float> best(row.logits, row.logits + data.vocab());
    const int64_t count = std::min(random.below(3) * random.below(200), data.vocab() - 1);
    std::nth_element(best.begin(), best.begin() + count, best.end(), std::greater<>());
    for (int64_t i = 0; i < data.vocab(); ++i) {
        if (row.logits[i] > best[static_cast<size_t>(count)] && random.below(4) != 0) {
            const_cast<int32_t*>(row.output_counts)[i] = static_cast<int32_t>(random.below(4));
            const_cast<uint64_t*>(row.prompt_seen)[i / 64] |= static_cast<uint64_t>(random.below(2))
                                                              << (i % 64);
        }
    }
}

inline void add_mixed_cases(std::vector<CudaOpCase>& cases, int64_t vocab, int64_t rows,
                            std::initializer_list<float> spreads) {
    for (const float spread : spreads) {
        const std::string name = "spread=" + std::to_string(static_cast<int>(spread * 10));
        cases.push_back(sample_cuda_case({name, vocab, rows, spread, edit_everything}, false));
    }
}

inline void add_rows_of_all_kinds(std::vector<CudaOpCase>& cases) {
    for (const int64_t vocab : {1, 5, 31, 64, 1000, 4096, 262144, 400000}) {
        add_mixed_cases(cases, vocab, vocab > 5000 ? 10 : 100, {0.0f, 0.5f, 5.0f, 40.0f});
    }
    for (const int64_t vocab : {kSampleKindsFewIds, kSampleKindsManyIds}) {
        const auto rows = static_cast<int64_t>(sample_kinds(vocab).size());
        cases.push_back(
            sample_cuda_case({"every kind", vocab, rows, kSampleKindsSpread, edit_to_kinds(vocab)}, false));
    }
    cases.push_back(sample_cuda_case({"many rows", 1500, 4000, 5, edit_everything}, false));
}

inline std::vector<CudaOpCase> sample_cuda_cases() {
    const auto greedy = [](SampleRowArgs& row, OpRandom&, SampleCase&) { row.temperature = 0; };
    const auto plain = [](SampleRowArgs& row, OpRandom&, SampleCase&) { row.temperature = 0.9f; };
    const auto nucleus = [](SampleRowArgs& row, OpRandom&, SampleCase&) {
        row.temperature = 0.9f;
        row.top_k = 50;
        row.top_p = 0.95f;
    };
    const auto whole = [](SampleRowArgs& row, OpRandom& random, SampleCase& data) {
        row.temperature = 0.8f;
        row.top_k = 50;
        row.top_p = 0.9f;
        row.repetition_penalty = 1.1f;
        row.presence_penalty = 0.2f;
        row.frequency_penalty = 0.1f;
        data.add_history(row, random);
    };
    const auto wide = [](SampleRowArgs& row, OpRandom&, SampleCase&) { row.top_k = 1000; };
    const auto some = [](SampleRowArgs& row, OpRandom& random, SampleCase&) {  // of few ids and of many
        row.top_k = static_cast<int32_t>(1 + random.below(256));
        row.top_p = random.below(2) == 0 ? 0.9f : 1.0f;
    };
    const auto crowded = [](SampleRowArgs& row, OpRandom& random, SampleCase& data) {
        row.top_k = static_cast<int32_t>(1 + random.below(300));
        row.top_p = random.below(2) == 0 ? 0.95f : 1.0f;
        row.logprobs = true;
        row.top = static_cast<int32_t>(random.below(kSampleTopMax + 1));
        auto* logits = const_cast<float*>(row.logits);
        // The best are neighbours, and some of them equal.
        const int64_t first = random.below(data.vocab() - 700);
        for (int64_t i = first; i < first + 700; ++i) {
            logits[i] = 20 + std::round(random.uniform() * 1000) / 1000;
        }
    };
    const auto tail = [](SampleRowArgs& row, OpRandom&, SampleCase&) { row.top_p = 0.999f; };
    const auto logprobs = [](SampleRowArgs& row, OpRandom&, SampleCase&) {
        row.temperature = 0;
        row.logprobs = true;
        row.top = 20;
    };
    std::vector<CudaOpCase> cases = sample_few_cases();
    for (const int64_t rows : {1, 8, 64, 256}) {
        cases.push_back(sample_cuda_case({"greedy", 120832, rows, 12, greedy}, true));
        cases.push_back(sample_cuda_case({"temperature", 120832, rows, 12, plain}, true));
        cases.push_back(sample_cuda_case({"top_k=50 top_p=0.95", 120832, rows, 12, nucleus}, true));
        cases.push_back(sample_cuda_case({"penalties top_k=50 top_p=0.9", 120832, rows, 12, whole}, true));
        cases.push_back(sample_cuda_case({"greedy top_logprobs=20", 120832, rows, 12, logprobs}, true));
    }
    for (const float spread : {1.0f, 12.0f}) {  // the slow way: cuts beyond the candidates
        cases.push_back(sample_cuda_case({"top_k=1000", 120832, 8, spread, wide}, spread > 1));
        cases.push_back(sample_cuda_case({"top_p=0.999", 120832, 8, spread, tail}, spread > 1));
    }
    for (const auto& [vocab, rows] : {std::pair<int64_t, int64_t>{17000, 130}, {33000, 60}}) {
        cases.push_back(sample_cuda_case({"top_k up to 256", vocab, rows, 12, some}, false));
        cases.push_back(sample_cuda_case({"the best are neighbours", vocab, rows, 12, crowded}, false));
        add_mixed_cases(cases, vocab, rows, {0.5f, 5.0f, 40.0f});
    }
    for (const int64_t vocab : {2048, 40000, 120832}) {
        cases.push_back(sample_cuda_case({"top_k up to 256", vocab, 30, 12, some}, false));
        cases.push_back(sample_cuda_case({"the best are neighbours", vocab, 30, 12, crowded}, false));
        cases.push_back(sample_cuda_case({"penalties top_k=50 top_p=0.9", vocab, 30, 1, whole}, false));
    }
    for (const int64_t rows : {1, 8, 30, 140}) {
        cases.push_back(
            sample_cuda_case({"the best were seen", 120832, rows, 12, edit_to_seen_bests}, false));
    }
    add_rows_of_all_kinds(cases);
    cases.push_back(sample_cuda_case({"everything", 120832, 48, 5, edit_everything}, true));
    return cases;
}

}  // namespace tessera

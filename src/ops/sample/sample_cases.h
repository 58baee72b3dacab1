// The cases of sample: rows with every combination of controls, over distributions from peaked to flat.
#pragma once

#include <fmt/format.h>
#include <memory>
#include <string>
#include <vector>

#include "ops/op_case.h"
#include "ops/sample/sample.h"

namespace tessera {

// Owns the rows and all that they point to. Row i has logits of its own; `edit` sets its controls.
class SampleCase {
  public:
    using Edit = std::function<void(SampleRowArgs& row, OpRandom& random, SampleCase& owner)>;

    SampleCase(int64_t vocab, int64_t rows, float spread, const Edit& edit, uint64_t seed = 0)
        : vocab_(vocab),
          workspace_(SampleWorkspace::create(vocab, 2).take()),
          results_(static_cast<size_t>(rows)) {
        OpRandom random(seed + static_cast<uint64_t>(vocab + rows));
        for (int64_t i = 0; i < rows; ++i) {
            std::vector<float>& logits = keep_floats(vocab);
            random.fill(logits, spread);
            SampleRowArgs row;
            row.logits = logits.data();
            row.seed = random.next();
            row.position = static_cast<uint64_t>(i);
            edit(row, random, *this);
            rows_.push_back(row);
        }
    }

    // Memory that lives as long as the case.
    std::vector<float>& keep_floats(int64_t n) { return *floats_.emplace_back(make<float>(n)); }
    std::vector<int32_t>& keep_ints(int64_t n) { return *ints_.emplace_back(make<int32_t>(n)); }
    std::vector<uint64_t>& keep_words(int64_t n) { return *words_.emplace_back(make<uint64_t>(n)); }
    std::vector<uint32_t>& keep_masks(int64_t n) { return *masks_.emplace_back(make<uint32_t>(n)); }
    std::vector<std::pair<int32_t, float>>& keep_biases() {
        return *biases_.emplace_back(std::make_unique<std::vector<std::pair<int32_t, float>>>());
    }

    // Fifty tokens in the prompt, and as many made.
    void add_history(SampleRowArgs& row, OpRandom& random) {
        std::vector<uint64_t>& seen = keep_words((vocab_ + 63) / 64);
        std::vector<int32_t>& counts = keep_ints(vocab_);
        for (int i = 0; i < 50; ++i) {
            const int64_t id = random.below(vocab_);
            seen[static_cast<size_t>(id / 64)] |= uint64_t{1} << (id % 64);
            ++counts[static_cast<size_t>(random.below(vocab_))];
        }
        row.prompt_seen = seen.data();
        row.output_counts = counts.data();
    }

    int64_t vocab() const { return vocab_; }
    std::vector<SampleRowArgs>& rows() { return rows_; }
    std::vector<SampleRowResult>& results() { return results_; }
    SampleArgs args() {
        return {.vocab = vocab_, .rows = rows_, .results = results_, .workspace = &workspace_};
    }

  private:
    template <typename T>
    static std::unique_ptr<std::vector<T>> make(int64_t n) {
        return std::make_unique<std::vector<T>>(static_cast<size_t>(n));
    }

    int64_t vocab_ = 0;
    SampleWorkspace workspace_;
    std::vector<SampleRowArgs> rows_;
    std::vector<SampleRowResult> results_;
    std::vector<std::unique_ptr<std::vector<float>>> floats_;
    std::vector<std::unique_ptr<std::vector<int32_t>>> ints_;
    std::vector<std::unique_ptr<std::vector<uint64_t>>> words_;
    std::vector<std::unique_ptr<std::vector<uint32_t>>> masks_;
    std::vector<std::unique_ptr<std::vector<std::pair<int32_t, float>>>> biases_;
};

// Any subset of the controls, at random.
inline void edit_everything(SampleRowArgs& row, OpRandom& random, SampleCase& owner) {
    const auto chance = [&](int64_t one_in) { return random.below(one_in) == 0; };
    const int64_t vocab = owner.vocab();
    row.temperature = chance(6) ? 0.0f : 0.1f + static_cast<float>(random.below(20)) * 0.1f;
    row.top_k = chance(2) ? static_cast<int32_t>(1 + random.below(chance(2) ? 40 : vocab + 10)) : 0;
    row.top_p = chance(2) ? static_cast<float>(1 + random.below(100)) / 100 : 1;
    row.min_p = chance(3) ? static_cast<float>(random.below(100)) / 200 : 0;
    row.logprobs = chance(2);
    row.top = static_cast<int32_t>(random.below(kSampleTopMax + 1));
    if (chance(2)) {
        row.repetition_penalty = 0.5f + static_cast<float>(random.below(15)) / 10;
        row.presence_penalty = random.uniform() * 2;
        row.frequency_penalty = random.uniform() * 2;
        owner.add_history(row, random);
        row.prompt_seen = chance(4) ? nullptr : row.prompt_seen;
        row.output_counts = chance(4) ? nullptr : row.output_counts;
    }
    if (chance(3)) {
        std::vector<uint32_t>& allowed = owner.keep_masks((vocab + 31) / 32);
        for (uint32_t& word : allowed) {
            word = static_cast<uint32_t>(random.next());
        }
        row.allowed = allowed.data();
    }
    if (chance(3)) {
        std::vector<int32_t>& masked = owner.keep_ints(3);
        for (int32_t& id : masked) {
            id = static_cast<int32_t>(random.below(vocab));
        }
        row.masked = masked;
    }
    if (chance(3)) {
        auto& biases = owner.keep_biases();
        for (int i = 0; i < 20; ++i) {
            biases.emplace_back(static_cast<int32_t>(random.below(vocab)), random.uniform() * 10);
        }
        row.logit_bias = biases;
    }
    if (chance(5)) {  // ties and dead tokens
        float* logits = const_cast<float*>(row.logits);
        for (int64_t i = 0; i < vocab; ++i) {
            logits[i] = std::round(logits[i]);
            logits[i] = chance(4) ? -INFINITY : logits[i];
        }
    }
}

// Tokens and errors as numbers, then the log-probabilities.
inline std::vector<float> flatten(const std::vector<SampleRowResult>& results) {
    std::vector<float> out;
    for (const SampleRowResult& r : results) {
        out.insert(out.end(), {static_cast<float>(r.token), static_cast<float>(r.error), r.logprob,
                               static_cast<float>(r.top_count)});
        for (int32_t i = 0; i < r.top_count; ++i) {
            out.push_back(static_cast<float>(r.top[static_cast<size_t>(i)].token));
            out.push_back(r.top[static_cast<size_t>(i)].logprob);
        }
    }
    return out;
}

struct SampleCaseSpec {
    int64_t vocab = 0;
    int64_t rows = 16;
    float spread = 12;
    SampleCase::Edit edit;
};

inline OpCase sample_case(std::string shape, const SampleCaseSpec& spec, bool bench) {
    OpCase result;
    result.shape = std::move(shape);
    result.dtype = "float32";
    result.bench = bench;
    result.prepare = [spec] {
        auto data = std::make_shared<SampleCase>(spec.vocab, spec.rows, spec.spread, spec.edit);
        OpCaseRun run;
        run.bytes = spec.vocab * spec.rows * 4;
        run.flops = 0;
        run.run = [data](OpContext& context) { sample(context, data->args()); };
        run.check = [data](OpContext& context) {
            sample(context, data->args());
            const std::vector<float> got = flatten(data->results());
            sample_ref(data->args());
            return compare(got, flatten(data->results()), 4e-6);
        };
        return run;
    };
    return result;
}

inline std::vector<OpCase> sample_cases() {
    const auto greedy = [](SampleRowArgs& row, OpRandom&, SampleCase&) { row.temperature = 0; };
    const auto plain = [](SampleRowArgs& row, OpRandom&, SampleCase&) { row.temperature = 0.9f; };
    const auto nucleus = [](SampleRowArgs& row, OpRandom&, SampleCase&) {
        row.temperature = 0.9f;
        row.top_k = 50;
        row.top_p = 0.95f;
    };
    const auto logprobs = [](SampleRowArgs& row, OpRandom&, SampleCase&) {
        row.temperature = 0;
        row.logprobs = true;
        row.top = 20;
    };
    std::vector<OpCase> cases;
    for (const int64_t vocab : {int64_t{4096}, int64_t{120832}}) {
        const std::string v = "vocab=" + std::to_string(vocab);
        cases.push_back(sample_case(v + " rows=16 greedy", {.vocab = vocab, .edit = greedy}, true));
        cases.push_back(sample_case(v + " rows=16 temperature", {.vocab = vocab, .edit = plain}, true));
        cases.push_back(
            sample_case(v + " rows=16 top_k=50 top_p=0.95", {.vocab = vocab, .edit = nucleus}, true));
        cases.push_back(
            sample_case(v + " rows=16 greedy top_logprobs=20", {.vocab = vocab, .edit = logprobs}, true));
    }
    for (const int64_t vocab : {1, 5, 31, 64, 1000, 4096}) {
        for (const float spread : {0.0f, 0.5f, 5.0f, 40.0f}) {
            const SampleCaseSpec spec{vocab, vocab > 1000 ? 100 : 300, spread, edit_everything};
            cases.push_back(sample_case(fmt::format("vocab={} spread={}", vocab, spread), spec, false));
        }
    }
    return cases;
}

}  // namespace tessera

// The cases of moe: the demonstration model's layer (bench), dense layers, and odd sizes.
#pragma once

#include <algorithm>
#include <fmt/format.h>
#include <memory>
#include <vector>

#include "ops/common/random_matrix.h"
#include "ops/moe/moe.h"

namespace tessera {

struct MoeCaseSpec {
    int64_t tokens = 1;
    int64_t hidden = 256;
    int64_t experts = 16;
    int64_t k = 4;
    int64_t width = 128;
    int64_t shared_width = 128;
    DType dtype = DType::kBFloat16;
    float input_scale = 0;       // FP8 only
    bool input_dynamic = false;  // int4 and blocks only
    bool blocks = false;         // FP8 only: scales of 128 x 128
    // A routed expert's groups of inputs have scales; the shared expert is bfloat16 then.
    bool grouped() const { return dtype == DType::kInt4 || blocks; }
};

class MoeCase {
  public:
    explicit MoeCase(const MoeCaseSpec& spec)
        : spec_(spec),
          workspace_(MoeWorkspace::create({spec.tokens, spec.experts, spec.k, spec.width, spec.shared_width})
                         .take()) {
        for (int64_t e = 0; e < spec.experts; ++e) {
            experts_.push_back(expert(spec.width, spec.dtype, spec.grouped()));
        }
        if (spec.shared_width > 0) {
            shared_ = expert(spec.shared_width, spec.grouped() ? DType::kBFloat16 : spec.dtype, false);
        }
        x_.resize(static_cast<size_t>(spec.tokens * spec.hidden));
        start_.resize(x_.size());
        random_.fill(x_);
        random_.fill(start_);
        for (int64_t t = 0; t < spec.tokens; ++t) {
            choose();
        }
        weights_.resize(chosen_.size());
        random_.fill(weights_);
    }

    MoeArgs args() {
        y_ = start_;
        return {.x = x_.data(),
                .x_stride = spec_.hidden,
                .tokens = spec_.tokens,
                .hidden = spec_.hidden,
                .experts = experts_,
                .k = spec_.k,
                .chosen = chosen_.data(),
                .weights = weights_.data(),
                .shared = spec_.shared_width > 0 ? &shared_ : nullptr,
                .y = y_.data(),
                .y_stride = spec_.hidden,
                .workspace = &workspace_};
    }
    const std::vector<float>& y() const { return y_; }

    // Weights of the experts that some token chose.
    int64_t bytes() const {
        int64_t total = spec_.tokens * spec_.hidden * 12;
        for (size_t e = 0; e < experts_.size(); ++e) {
            if (std::find(chosen_.begin(), chosen_.end(), static_cast<int32_t>(e)) != chosen_.end()) {
                total += experts_[e].gate_up.bytes() + experts_[e].down.bytes();
            }
        }
        return total + (spec_.shared_width > 0 ? shared_.gate_up.bytes() + shared_.down.bytes() : 0);
    }
    int64_t flops() const {
        return 6 * spec_.tokens * spec_.hidden * (spec_.k * spec_.width + spec_.shared_width);
    }

  private:
    ExpertWeights expert(int64_t width, DType dtype, bool grouped) {
        RandomMatrixSpec matrix{.outputs = 2 * width,
                                .inputs = spec_.hidden,
                                .dtype = dtype,
                                .alternate = true,
                                .scale = dtype == DType::kInt4 ? 0.02f : 0.002f,
                                .input_scale = spec_.input_scale,
                                .input_dynamic = grouped && spec_.input_dynamic,
                                .blocks = grouped && spec_.blocks};
        matrices_.push_back(std::make_unique<RandomMatrix>(matrix, random_));
        matrix.outputs = spec_.hidden;
        matrix.inputs = width;
        matrix.alternate = false;
        matrices_.push_back(std::make_unique<RandomMatrix>(matrix, random_));
        return {matrices_[matrices_.size() - 2]->packed(), matrices_.back()->packed()};
    }

    void choose() {
        std::vector<int32_t> all;
        for (int32_t e = 0; e < spec_.experts; ++e) {
            all.push_back(e);
        }
        for (int64_t i = 0; i < spec_.k; ++i) {
            std::swap(all[static_cast<size_t>(i)],
                      all[static_cast<size_t>(i + random_.below(spec_.experts - i))]);
        }
        std::sort(all.begin(), all.begin() + spec_.k);
        chosen_.insert(chosen_.end(), all.begin(), all.begin() + spec_.k);
    }

    MoeCaseSpec spec_;
    OpRandom random_{11};
    MoeWorkspace workspace_;
    std::vector<std::unique_ptr<RandomMatrix>> matrices_;
    std::vector<ExpertWeights> experts_;
    ExpertWeights shared_;
    std::vector<float> x_, start_, y_, weights_;
    std::vector<int32_t> chosen_;
};

inline OpCase moe_case(const MoeCaseSpec& spec, bool bench) {
    OpCase c;
    c.shape = fmt::format("tokens={} hidden={} experts={} k={} width={} shared={}", spec.tokens, spec.hidden,
                          spec.experts, spec.k, spec.width, spec.shared_width);
    c.dtype = fmt::format("{}{}", dtype_name(spec.dtype), spec.blocks ? " in blocks" : "");
    c.bench = bench;
    c.prepare = [spec] {
        auto data = std::make_shared<MoeCase>(spec);
        const MoeArgs args = data->args();
        OpCaseRun run;
        run.bytes = data->bytes();
        run.flops = data->flops();
        run.run = [data, args](OpContext& context) { moe(context, args); };
        run.check = [data](OpContext& context) {
            moe(context, data->args());
            const std::vector<float> got = data->y();
            moe_ref(data->args());
            return compare(got, data->y(), 0);
        };
        return run;
    };
    return c;
}

inline std::vector<OpCase> moe_cases() {
    std::vector<OpCase> cases;
    for (DType dtype : {DType::kBFloat16, DType::kFloat32}) {
        cases.push_back(moe_case({1, 64, 5, 2, 32, 48, dtype}, false));
        cases.push_back(moe_case({1, 570, 5, 2, 160, 48, dtype}, false));  // blocks in pairs, one alone
        cases.push_back(moe_case({127, 63, 3, 2, 17, 0, dtype}, false));
        cases.push_back(moe_case({65, 129, 9, 3, 65, 33, dtype}, false));
    }
    cases.push_back(moe_case({9, 64, 4, 2, 48, 32, DType::kFloat8E4M3, 0.01f}, false));
    for (const bool dynamic : {false, true}) {
        cases.push_back(moe_case({1, 256, 5, 2, 128, 48, DType::kInt4, 0, dynamic}, false));
        cases.push_back(moe_case({65, 384, 3, 2, 192, 0, DType::kInt4, 0, dynamic}, false));  // a short group
        // Blocks that end early, in outputs and in inputs.
        cases.push_back(moe_case({1, 300, 5, 2, 200, 48, DType::kFloat8E4M3, 0, dynamic, true}, false));
        cases.push_back(moe_case({65, 129, 3, 2, 135, 0, DType::kFloat8E4M3, 0, dynamic, true}, false));
    }
    for (int64_t tokens : {1, 16, 256}) {
        cases.push_back(moe_case({.tokens = tokens}, true));
        cases.push_back(moe_case({.tokens = tokens, .dtype = DType::kInt4, .input_dynamic = true}, true));
    }
    return cases;
}

// Dense layers: no routed experts.
inline std::vector<OpCase> swiglu_cases() {
    std::vector<OpCase> cases;
    for (const DType dtype : {DType::kBFloat16, DType::kFloat32}) {
        cases.push_back(moe_case({1, 63, 0, 0, 0, 65, dtype}, false));
        cases.push_back(moe_case({129, 65, 0, 0, 0, 127, dtype}, false));
    }
    for (const int64_t tokens : {1, 256}) {
        cases.push_back(
            moe_case({.tokens = tokens, .experts = 0, .k = 0, .width = 0, .shared_width = 1024}, true));
    }
    return cases;
}

}  // namespace tessera

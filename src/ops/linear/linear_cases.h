// The cases of linear: the demonstration model's shapes (bench), and odd ones.
#pragma once

#include <fmt/format.h>
#include <limits>
#include <memory>
#include <vector>

#include "ops/common/random_matrix.h"
#include "ops/linear/linear.h"

namespace tessera {

struct LinearCaseSpec {
    int64_t rows = 1;
    RandomMatrixSpec matrix;
    bool accumulate = false;
};

class LinearCase {
  public:
    explicit LinearCase(const LinearCaseSpec& spec) : spec_(spec), matrix_(spec.matrix, random_) {
        x_.resize(static_cast<size_t>(spec.rows * spec.matrix.inputs));
        start_.resize(static_cast<size_t>(spec.rows * spec.matrix.outputs),
                      std::numeric_limits<float>::quiet_NaN());
        random_.fill(x_, 2);
        if (spec.accumulate) {
            random_.fill(start_, 1);
        }
        for (int64_t i = 0; i < spec.rows; ++i) {
            x_rows_.push_back(static_cast<int32_t>(spec.rows - 1 - i));
        }
    }

    LinearArgs args() {
        y_ = start_;
        return {.x = x_.data(),
                .x_stride = spec_.matrix.inputs,
                .x_rows = spec_.rows % 2 == 1 ? x_rows_.data() : nullptr,
                .rows = spec_.rows,
                .weight = &matrix_.packed(),
                .y = y_.data(),
                .y_stride = spec_.matrix.outputs,
                .outputs = spec_.matrix.outputs,
                .accumulate = spec_.accumulate};
    }
    std::vector<float>& y() { return y_; }
    const std::vector<float>& x() const { return x_; }
    const RandomMatrix& matrix() const { return matrix_; }

  private:
    LinearCaseSpec spec_;
    OpRandom random_{7};
    RandomMatrix matrix_;
    std::vector<float> x_, start_, y_;
    std::vector<int32_t> x_rows_;
};

inline OpCase linear_case(const LinearCaseSpec& spec, bool bench) {
    OpCase c;
    c.shape = fmt::format("rows={} outputs={} inputs={}{}", spec.rows, spec.matrix.outputs,
                          spec.matrix.inputs, spec.accumulate ? " +=" : "");
    c.dtype = fmt::format("{}{}", dtype_name(spec.matrix.dtype), spec.matrix.blocks ? " in blocks" : "");
    c.bench = bench;
    c.prepare = [spec] {
        auto data = std::make_shared<LinearCase>(spec);
        const LinearArgs args = data->args();
        OpCaseRun run;
        run.bytes =
            data->matrix().packed().bytes() + spec.rows * (spec.matrix.inputs + spec.matrix.outputs) * 4;
        run.flops = 2 * spec.rows * spec.matrix.outputs * spec.matrix.inputs;
        run.run = [data, args](OpContext& context) { linear(context, args); };
        run.check = [data](OpContext& context) {
            linear(context, data->args());
            const std::vector<float> got = data->y();
            linear_ref(data->args());
            return compare(got, data->y(), 0);
        };
        return run;
    };
    return c;
}

inline std::vector<OpCase> linear_cases() {
    std::vector<OpCase> cases;
    for (DType dtype : {DType::kBFloat16, DType::kFloat16, DType::kFloat32}) {
        for (int64_t outputs : {512, 600, 650}) {  // blocks in pairs; the last is whole, short, or alone
            cases.push_back(linear_case({1, {.outputs = outputs, .inputs = 127, .dtype = dtype}}, false));
        }
        for (int64_t rows : {1, 2, 7, 63, 97, 129}) {
            cases.push_back(linear_case({rows, {.outputs = 65, .inputs = 127, .dtype = dtype}}, false));
        }
        cases.push_back(linear_case({5, {.outputs = 16, .inputs = 1, .dtype = dtype}, true}, false));
        cases.push_back(linear_case({3, {.outputs = 129, .inputs = 63, .dtype = dtype}, true}, false));
    }
    for (float input_scale : {0.0f, 0.01f}) {
        for (int64_t rows : {1, 13}) {
            cases.push_back(linear_case({rows,
                                         {.outputs = 80,
                                          .inputs = 300,
                                          .dtype = DType::kFloat8E4M3,
                                          .scale = 0.003f,
                                          .input_scale = input_scale},
                                         true},
                                        false));
        }
    }
    for (const bool dynamic : {false, true}) {  // blocks that end early, in outputs and in inputs
        for (int64_t rows : {1, 7, 97}) {
            for (int64_t inputs : {127, 256, 301}) {
                cases.push_back(linear_case({rows,
                                             {.outputs = 200,
                                              .inputs = inputs,
                                              .dtype = DType::kFloat8E4M3,
                                              .scale = 0.003f,
                                              .input_dynamic = dynamic,
                                              .blocks = true}},
                                            false));
            }
        }
    }
    for (int64_t rows : {1, 16, 256}) {
        cases.push_back(linear_case({rows, {.outputs = 2560, .inputs = 256}}, true));
        cases.push_back(linear_case({rows, {.outputs = 256, .inputs = 2048}, true}, true));
    }
    cases.push_back(linear_case({16, {.outputs = 4096, .inputs = 256}}, true));
    return cases;
}

}  // namespace tessera

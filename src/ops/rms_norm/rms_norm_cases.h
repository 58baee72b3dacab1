// The cases of rms_norm.
#pragma once

#include <fmt/format.h>
#include <limits>
#include <memory>
#include <vector>

#include "ops/op_case.h"
#include "ops/rms_norm/rms_norm.h"

namespace tessera {

struct RmsNormCase {
    RmsNormCase(int64_t row_count, int64_t row_width) : rows(row_count), width(row_width) {
        OpRandom random(1);
        x.resize(static_cast<size_t>(rows * (width + 3)));
        weight.resize(static_cast<size_t>(width));
        random.fill(x, 3);
        random.fill(weight);
    }
    RmsNormArgs args() {
        y.assign(static_cast<size_t>(rows * width), std::numeric_limits<float>::quiet_NaN());
        return {.x = x.data(),
                .x_stride = width + 3,
                .weight = weight.data(),
                .y = y.data(),
                .y_stride = width,
                .rows = rows,
                .width = width,
                .eps = 1e-5f};
    }

    int64_t rows, width;
    std::vector<float> x, weight, y;
};

inline std::vector<OpCase> rms_norm_cases() {
    std::vector<OpCase> cases;
    const auto add = [&](int64_t rows, int64_t width, bool bench) {
        OpCase c;
        c.shape = fmt::format("rows={} width={}", rows, width);
        c.dtype = "float32";
        c.bench = bench;
        c.prepare = [rows, width] {
            auto data = std::make_shared<RmsNormCase>(rows, width);
            const RmsNormArgs args = data->args();
            OpCaseRun run;
            run.bytes = rows * width * 8;
            run.flops = rows * width * 4;
            run.run = [data, args](OpContext& context) { rms_norm(context, args); };
            run.check = [data](OpContext& context) {
                rms_norm(context, data->args());
                const std::vector<float> got = data->y;
                rms_norm_ref(data->args());
                return compare(got, data->y, 0);
            };
            return run;
        };
        cases.push_back(std::move(c));
    };
    for (int64_t width : {1, 16, 63, 65, 127, 129}) {
        add(5, width, false);
    }
    add(1, 256, true);
    add(2048, 256, true);
    add(16, 4096, true);
    return cases;
}

}  // namespace tessera

// The cases of embed.
#pragma once

#include <fmt/format.h>
#include <limits>
#include <memory>
#include <vector>

#include "ops/common/half.h"
#include "ops/embed/embed.h"
#include "ops/op_case.h"

namespace tessera {

struct EmbedCase {
    EmbedCase(int64_t row_count, int64_t row_width, DType table_dtype)
        : rows(row_count), width(row_width), dtype(table_dtype) {
        OpRandom random(2);
        values.resize(static_cast<size_t>(kVocab * width));
        random.fill(values);
        for (float& value : values) {
            bits.push_back(f32_to_bf16(value));
            value = dtype == DType::kBFloat16 ? bf16_to_f32(bits.back()) : value;
        }
        for (int64_t r = 0; r < rows; ++r) {
            tokens.push_back(static_cast<int32_t>(random.below(kVocab)));
        }
    }
    EmbedArgs args() {
        y.assign(static_cast<size_t>(rows * width), std::numeric_limits<float>::quiet_NaN());
        const void* table = dtype == DType::kBFloat16 ? static_cast<const void*>(bits.data()) : values.data();
        return {.table = table,
                .dtype = dtype,
                .width = width,
                .tokens = tokens.data(),
                .rows = rows,
                .y = y.data(),
                .y_stride = width};
    }
    std::vector<float> reference() const {
        std::vector<float> out;
        for (const int32_t token : tokens) {
            const auto row = values.begin() + token * width;
            out.insert(out.end(), row, row + width);
        }
        return out;
    }

    static constexpr int64_t kVocab = 1000;
    int64_t rows, width;
    DType dtype;
    std::vector<float> values, y;  // values: of the table, as float32
    std::vector<uint16_t> bits;
    std::vector<int32_t> tokens;
};

inline std::vector<OpCase> embed_cases() {
    std::vector<OpCase> cases;
    const auto add = [&](int64_t rows, int64_t width, DType dtype, bool bench) {
        OpCase c;
        c.shape = fmt::format("rows={} width={}", rows, width);
        c.dtype = dtype_name(dtype);
        c.bench = bench;
        c.prepare = [=] {
            auto data = std::make_shared<EmbedCase>(rows, width, dtype);
            const EmbedArgs args = data->args();
            OpCaseRun run;
            run.bytes = rows * width * (4 + dtype_size(dtype));
            run.run = [data, args](OpContext& context) { embed(context, args); };
            run.check = [data](OpContext& context) {
                embed(context, data->args());
                return compare(data->y, data->reference(), 0);
            };
            return run;
        };
        cases.push_back(std::move(c));
    };
    for (const DType dtype : {DType::kBFloat16, DType::kFloat32}) {
        add(1, 1, dtype, false);
        add(63, 65, dtype, false);
        add(129, 127, dtype, false);
        add(16, 4096, dtype, true);
        add(2048, 256, dtype, true);
    }
    return cases;
}

}  // namespace tessera

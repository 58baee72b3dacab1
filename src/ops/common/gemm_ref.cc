#include <algorithm>
#include <cmath>

#include "ops/common/exp.h"
#include "ops/common/gemm.h"
#include "ops/common/half.h"

namespace tessera {
namespace {

struct Chain {
    int64_t output = 0;
    int64_t begin = 0;  // k's
    int64_t end = 0;
};

// in > 0: the row is rounded to e4m3(x / in).
float chain(const PackedMatrix& weight, const float* row, float in, const Chain& part) {
    float sum = 0.0f;
    for (int64_t k = part.begin; k < part.end; ++k) {
        sum = std::fma(in > 0 ? round_to_e4m3(row[k] / in) : row[k], packed_weight(weight, part.output, k),
                       sum);
    }
    return sum;
}

// 0 where rows are not rounded.
float row_scale(const PackedMatrix& weight, const float* row) {
    if (!weight.input_dynamic) {
        return weight.input_scale;
    }
    float largest = 0;
    for (int64_t k = 0; k < weight.inputs; ++k) {
        largest = std::fmax(largest, std::fabs(row[k]));
    }
    return e4m3_row_scale(largest);
}

}  // namespace

void gemm_block_ref(const GemmBlockArgs& args) {
    const PackedMatrix& weight = *args.weight;
    const int64_t end = std::min(weight.block_panels(args.block) * kPanelOutputs, args.first + args.columns);
    for (int64_t r = 0; r < args.row_count; ++r) {
        for (int64_t c = args.first; c < end; ++c) {
            const int64_t output = args.block * kBlockOutputs + c;
            const float in = row_scale(weight, args.rows[r]);
            float sum = 0.0f;
            if (weight.group_scale != nullptr) {
                for (int64_t g = 0; g < weight.groups(); ++g) {
                    const int64_t end_k = std::min((g + 1) * kGroupInputs, weight.inputs);
                    const float part = chain(weight, args.rows[r], in, {output, g * kGroupInputs, end_k});
                    sum = std::fma(weight.group_scale[g * weight.outputs + output], part, sum);
                }
                sum *= in > 0 ? in : 1.0f;
            } else {
                sum = chain(weight, args.rows[r], in, {output, 0, weight.inputs});
            }
            if (weight.column_scale != nullptr) {
                sum *= weight.column_scale[output] * (in > 0 ? in : 1.0f);
            }
            args.out[r * kBlockOutputs + c] = sum;
        }
    }
}

void swiglu_block_ref(const SwigluBlockArgs& args) {
    for (int64_t r = 0; r < args.rows; ++r) {
        for (int64_t i = 0; i < args.pairs * kPanelOutputs; ++i) {
            const float* gate = args.out + r * kBlockOutputs + i / kPanelOutputs * kPanelOutputs + i;
            args.y[r * args.y_stride + i] = silu_f32(gate[0]) * gate[kPanelOutputs];
        }
    }
}

}  // namespace tessera

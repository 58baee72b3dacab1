#include <algorithm>
#include <cmath>

#include "ops/common/exp.h"
#include "ops/common/gemm.h"
#include "ops/common/half.h"

namespace tessera {

void gemm_block_ref(const GemmBlockArgs& args) {
    const PackedMatrix& weight = *args.weight;
    const int64_t end = std::min(weight.block_panels(args.block) * kPanelOutputs, args.first + args.columns);
    for (int64_t r = 0; r < args.row_count; ++r) {
        for (int64_t c = args.first; c < end; ++c) {
            const int64_t output = args.block * kBlockOutputs + c;
            float sum = 0.0f;
            for (int64_t k = 0; k < weight.inputs; ++k) {
                const float x = args.rows[r][k];
                sum = std::fma(weight.input_scale > 0 ? round_to_e4m3(x / weight.input_scale) : x,
                               packed_weight(weight, output, k), sum);
            }
            if (weight.column_scale != nullptr) {
                const float in = weight.input_scale > 0 ? weight.input_scale : 1.0f;
                sum *= weight.column_scale[output] * in;
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

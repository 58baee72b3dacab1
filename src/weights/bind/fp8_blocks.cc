#include "weights/fp8_blocks.h"

#include <array>

#include "base/check.h"
#include "weights/bind/float_convert.h"

namespace tessera {

void fp8_blocks_to_bf16(const LinearWeights& linear, uint16_t* out) {
    const WeightView& weight = linear.weight;
    check(linear.blocks.has_value() && weight.dtype == DType::kFloat8E4M3,
          "fp8_blocks_to_bf16: blocks of e4m3");
    std::array<float, 256> values{};
    for (size_t code = 0; code < values.size(); ++code) {
        values[code] = e4m3_value(static_cast<uint8_t>(code));
    }
    const auto* codes = static_cast<const uint8_t*>(weight.data);
    const int64_t across = (weight.cols + kFp8Block - 1) / kFp8Block;
    for (int64_t row = 0; row < weight.rows; ++row) {
        const float* scales = linear.blocks->scales + row / kFp8Block * across;
        for (int64_t col = 0; col < weight.cols; ++col) {
            const int64_t at = row * weight.cols + col;
            out[at] = bfloat16_bits(values[codes[at]] * scales[col / kFp8Block]);
        }
    }
}

}  // namespace tessera

#include "weights/bind/float_convert.h"

#include <bit>
#include <cmath>

#include "base/check.h"

namespace tessera {

float float_from_bfloat16(uint16_t bits) {
    return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16);
}

float float_from_float16(uint16_t bits) {
    const uint32_t sign = static_cast<uint32_t>(bits & 0x8000U) << 16;
    const uint32_t exponent = (bits >> 10) & 0x1FU;
    const uint32_t fraction = bits & 0x3FFU;
    if (exponent == 0) {
        const float value = std::ldexp(static_cast<float>(fraction), -24);  // zero and subnormals
        return std::bit_cast<float>(sign | std::bit_cast<uint32_t>(value));
    }
    // Infinity and NaN keep an all-ones exponent; the others are rebiased from 15 to 127.
    const uint32_t wide = exponent == 0x1FU ? 0xFFU : exponent + 112;
    return std::bit_cast<float>(sign | (wide << 23) | (fraction << 13));
}

void widen(const WeightView& view, float* out) {
    const auto* in = static_cast<const uint16_t*>(view.data);
    const bool brain = view.dtype == DType::kBFloat16;
    check(brain || view.dtype == DType::kFloat16, "widen() takes bfloat16 or float16");
    for (int64_t i = 0; i < view.rows * view.cols; ++i) {
        out[i] = brain ? float_from_bfloat16(in[i]) : float_from_float16(in[i]);
    }
}

}  // namespace tessera

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

uint16_t bfloat16_bits(float value) {
    const auto bits = std::bit_cast<uint32_t>(value);
    if (std::isnan(value)) {
        return static_cast<uint16_t>(bits >> 16 | 0x40U);
    }
    return static_cast<uint16_t>((bits + 0x7FFFU + (bits >> 16 & 1U)) >> 16);
}

float e4m3_value(uint8_t code) {
    const int exponent = code >> 3 & 15;
    const int fraction = code & 7;
    if ((code & 0x7F) == 0x7F) {
        return NAN;
    }
    const float size = exponent == 0 ? std::ldexp(static_cast<float>(fraction), -9)
                                     : std::ldexp(static_cast<float>(8 + fraction), exponent - 10);
    return (code & 0x80) != 0 ? -size : size;
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

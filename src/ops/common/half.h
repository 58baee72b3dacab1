// Conversions between float32 and the narrow formats, exact or rounded to nearest even.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

namespace tessera {

inline float bf16_to_f32(uint16_t bits) {
    return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16);
}

// Rounds to nearest even; a NaN stays a NaN.
inline uint16_t f32_to_bf16(float value) {
    const uint32_t bits = std::bit_cast<uint32_t>(value);
    if ((bits & 0x7FFFFFFFu) > 0x7F800000u) {
        return static_cast<uint16_t>((bits >> 16) | 0x40u);
    }
    return static_cast<uint16_t>((bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16);
}

inline float f16_to_f32(uint16_t bits) {
    const uint32_t sign = static_cast<uint32_t>(bits & 0x8000u) << 16;
    const uint32_t exponent = (bits >> 10) & 0x1Fu;
    const uint32_t mantissa = bits & 0x3FFu;
    if (exponent == 0) {  // zero or subnormal: mantissa * 2^-24
        const float magnitude = static_cast<float>(mantissa) * 0x1p-24f;
        return std::bit_cast<float>(std::bit_cast<uint32_t>(magnitude) | sign);
    }
    const uint32_t wide = exponent == 31 ? 0xFFu : exponent + 112;
    return std::bit_cast<float>(sign | (wide << 23) | (mantissa << 13));
}

// FP8 e4m3 (the "fn" kind: no infinities, 0x7F and 0xFF are NaN, largest 448, smallest 2^-9).
inline constexpr float kE4m3Max = 448.0f;

inline float e4m3_to_f32(uint8_t bits) {
    const uint32_t sign = static_cast<uint32_t>(bits & 0x80u) << 24;
    const uint32_t magnitude = bits & 0x7Fu;
    if (magnitude == 0x7Fu) {
        return std::bit_cast<float>(sign | 0x7FC00000u);
    }
    if (magnitude < 8) {  // mantissa * 2^-9
        return std::bit_cast<float>(std::bit_cast<uint32_t>(static_cast<float>(magnitude) * 0x1p-9f) | sign);
    }
    return std::bit_cast<float>(sign | ((magnitude << 20) + (120u << 23)));
}

// The e4m3 value nearest to x as a float32: ties to even, saturating at 448 as CUDA's cvt.satfinite does.
inline float round_to_e4m3(float x) {
    const uint32_t bits = std::bit_cast<uint32_t>(x);
    const uint32_t sign = bits & 0x80000000u;
    float magnitude = std::bit_cast<float>(bits & 0x7FFFFFFFu);
    if (magnitude != magnitude) {
        return x;
    }
    magnitude = kE4m3Max < magnitude ? kE4m3Max : magnitude;
    if (magnitude < 0x1p-6f) {  // subnormal: a multiple of 2^-9, whose ulp 1.5 * 2^14 has
        magnitude = (magnitude + 0x1.8p14f) - 0x1.8p14f;
    } else {  // three mantissa bits
        const uint32_t m = std::bit_cast<uint32_t>(magnitude);
        magnitude = std::bit_cast<float>((m + 0x7FFFFu + ((m >> 20) & 1u)) & 0xFFF00000u);
    }
    return std::bit_cast<float>(std::bit_cast<uint32_t>(magnitude) | sign);
}

// The scale of a row whose largest magnitude is `largest`: positive and finite. A row of zeros may have any.
inline float e4m3_row_scale(float largest) {
    return (largest > 1e-12f ? largest : 1e-12f) / kE4m3Max;
}

}  // namespace tessera

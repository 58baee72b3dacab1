#include "weights/export/e4m3.h"

#include <algorithm>
#include <bit>
#include <cmath>

namespace tessera {

uint8_t e4m3_code(float value) {
    const uint32_t bits = std::bit_cast<uint32_t>(value);
    const auto sign = static_cast<uint8_t>(bits >> 24 & 0x80u);
    const float magnitude = std::min(std::fabs(value), kE4m3Largest);
    if (magnitude < 0x1p-6f) {  // subnormal: a multiple of 2^-9; 8 is the code of the smallest normal
        return sign | static_cast<uint8_t>(std::nearbyint(magnitude * 0x1p9f));
    }
    const uint32_t m = std::bit_cast<uint32_t>(magnitude);
    const uint32_t rounded = m + 0x7FFFFu + (m >> 20 & 1u);  // three mantissa bits stay
    return sign | static_cast<uint8_t>((rounded >> 20) - (120u << 3));
}

float e4m3_scale(float largest) {
    // A tensor of zeros may have any scale.
    return std::max(largest, 1e-12f) / kE4m3Largest;
}

}  // namespace tessera

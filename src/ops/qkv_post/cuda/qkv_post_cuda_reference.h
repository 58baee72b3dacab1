// The float64 reference of a head on the device, as ranges. One bfloat16 step before the Hadamard matrix
// moves all 128 elements after it.
#pragma once

#include <cmath>
#include <span>

#include "ops/cuda/value_range.h"

namespace tessera {

// Of the factor of a norm: the sum of squares of at most 256 elements by 16 lanes, rsqrtf and a product.
inline constexpr double kHeadNormError = 1e-6;

// The quotient by a head's own scale is one product.
inline constexpr double kOwnScaleError = 0x1p-22;

// Cosines, then sines.
inline void range_rotate(ValueRanges& x, std::span<const float> angles) {
    constexpr double kError = 0x1p-22;  // of a product, of the sum and of its conversion
    const size_t half = x.size() / 2;
    const auto rounded = [](const ValueRange& a, const ValueRange& b) {
        const double error = kError * (largest_magnitude(a) + largest_magnitude(b));
        return rounded_bf16(a + b + ValueRange{-error, error});
    };
    for (size_t i = 0; i < half; ++i) {
        const ValueRange a = x[i];
        const ValueRange b = x[i + half];
        x[i] = rounded(a * angles[i], b * -angles[half + i]);
        x[i + half] = rounded(b * angles[i], a * angles[half + i]);
    }
}

inline void range_hadamard(ValueRanges& x) {
    double sum = 0;
    for (const ValueRange& value : x) {
        sum += largest_magnitude(value);
    }
    int steps = 2;  // the product and its conversion, and then
    for (size_t bit = 1; bit < x.size(); bit *= 2, ++steps) {
        for (size_t i = 0; i < x.size(); ++i) {
            if ((i & bit) == 0) {
                const ValueRange a = x[i];
                x[i] = a + x[i + bit];
                x[i + bit] = a - x[i + bit];
            }
        }
    }
    const double error = steps * 0x1p-24 * sum;  // each step rounds sums of all elements' magnitudes at most
    for (ValueRange& value : x) {
        value = rounded_bf16((value + ValueRange{-error, error}) * (1 / std::sqrt(double(x.size()))));
    }
}

}  // namespace tessera

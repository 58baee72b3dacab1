// The float64 reference of a head on the device, as ranges.
//
// A value that float32 arithmetic puts near a tie may be rounded to either neighbour, and what follows (the
// Hadamard matrix most of all: one bfloat16 step before it moves all 128 elements) depends on which. So the
// reference follows what each value may be: from the float64 result less and plus the bound of float32's
// error at that step to the same at both ends. Rounding never reverses an order: the ends rounded are the
// ends of what the rounded value may be. Away from ties both ends are one number, and the device must give
// it.
#pragma once

#include <algorithm>
#include <cmath>
#include <span>
#include <vector>

#include "ops/cuda/cuda_case.h"

namespace tessera {

struct ValueRange {
    double low = 0;
    double high = 0;

    static ValueRange around(double value, double error) { return {value - error, value + error}; }
};
using HeadRange = std::vector<ValueRange>;

inline ValueRange operator+(const ValueRange& a, const ValueRange& b) {
    return {a.low + b.low, a.high + b.high};
}
inline ValueRange operator-(const ValueRange& a, const ValueRange& b) {
    return {a.low - b.high, a.high - b.low};
}
inline ValueRange operator*(const ValueRange& a, double b) {
    return b < 0 ? ValueRange{a.high * b, a.low * b} : ValueRange{a.low * b, a.high * b};
}
inline double largest_magnitude(const ValueRange& a) {
    return std::fmax(std::fabs(a.low), std::fabs(a.high));
}
inline double smallest_magnitude(const ValueRange& a) {
    return a.low <= 0 && a.high >= 0 ? 0 : std::fmin(std::fabs(a.low), std::fabs(a.high));
}
inline ValueRange rounded_bf16(const ValueRange& a) {
    return {rounded_bf16(static_cast<float>(a.low)), rounded_bf16(static_cast<float>(a.high))};
}

inline HeadRange exact_head(std::span<const float> x) {
    HeadRange out;
    for (const float value : x) {
        out.push_back({value, value});
    }
    return out;
}

// The sum of squares of at most 256 elements by 16 lanes, rsqrtf and a product.
inline constexpr double kNormError = 1e-6;

inline void range_norm(HeadRange& x, std::span<const float> weight, double eps) {
    double least = 0;
    double most = 0;
    for (const ValueRange& value : x) {
        least += smallest_magnitude(value) * smallest_magnitude(value);
        most += largest_magnitude(value) * largest_magnitude(value);
    }
    const double count = static_cast<double>(x.size());
    const double high = (1 + kNormError) / std::sqrt(least / count + eps);
    const double low = (1 - kNormError) / std::sqrt(most / count + eps);
    for (size_t i = 0; i < x.size(); ++i) {
        const ValueRange scaled{x[i].low * (x[i].low < 0 ? high : low),
                                x[i].high * (x[i].high < 0 ? low : high)};
        x[i] = rounded_bf16(rounded_bf16(scaled) * weight[i]);
    }
}

// Cosines, then sines.
inline void range_rotate(HeadRange& x, std::span<const float> angles) {
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

inline void range_hadamard(HeadRange& x) {
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

// The scale of a head that has one of its own; the quotient by it is one product.
inline constexpr double kOwnScaleError = 0x1p-22;

inline ValueRange range_scale(const HeadRange& x) {
    float least = 0;
    float most = 0;
    for (const ValueRange& value : x) {
        least = std::fmax(least, static_cast<float>(smallest_magnitude(value)));
        most = std::fmax(most, static_cast<float>(largest_magnitude(value)));
    }
    return {std::fmax(least, 1e-20f) / kE4m3Max, std::fmax(most, 1e-20f) / kE4m3Max};
}

// error: of the quotient, relative.
inline ValueRange range_e4m3(const ValueRange& x, const ValueRange& scale, double error) {
    const auto code = [](double value, double by, double factor) {
        const float quotient = static_cast<float>(value) / static_cast<float>(by);
        return round_to_e4m3(static_cast<float>(quotient * factor));
    };
    return {code(x.low, x.low < 0 ? scale.low : scale.high, x.low < 0 ? 1 + error : 1 - error),
            code(x.high, x.high < 0 ? scale.high : scale.low, x.high < 0 ? 1 - error : 1 + error)};
}

// What an output may hold, element by element; NaN: nobody writes it.
struct OutputRange {
    std::vector<float> low, high;

    explicit OutputRange(int64_t count) : low(static_cast<size_t>(count), NAN), high(low) {}
    void set(int64_t place, const ValueRange& value) {
        low[static_cast<size_t>(place)] = static_cast<float>(value.low);
        high[static_cast<size_t>(place)] = static_cast<float>(value.high);
    }
};

// Every element must lie in its range. Ranges are few that are not one number: more than a twentieth would
// be a reference that compares nothing.
inline OpError compare_range(std::span<const float> got, const OutputRange& want) {
    OpError error;
    error.compared = static_cast<int64_t>(want.low.size());
    if (got.size() != want.low.size()) {
        error.mismatches = error.compared + 1;
        return error;
    }
    int64_t wide = 0;
    for (size_t i = 0; i < got.size(); ++i) {
        const double g = static_cast<double>(got[i]);
        const double low = static_cast<double>(want.low[i]);
        const double high = static_cast<double>(want.high[i]);
        wide += low < high ? 1 : 0;
        if (std::isnan(low)) {
            error.mismatches += std::isnan(g) ? 0 : 1;
        } else if (!(g >= low && g <= high)) {
            const double difference = std::isnan(g) ? INFINITY : std::fmax(low - g, g - high);
            error.max_abs = std::fmax(error.max_abs, difference);
            error.max_rel = std::fmax(error.max_rel, difference / std::fmax(std::fabs(low), 1e-6));
            ++error.mismatches;
        }
    }
    error.mismatches += wide > 20 + error.compared / 20 ? wide : 0;
    return error;
}

}  // namespace tessera

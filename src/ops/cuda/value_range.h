// The float64 reference of what is rounded on the device, as ranges.
//
// A value that float32 arithmetic puts near a tie may be rounded to either neighbour, and what follows
// depends on which. So the reference follows what each value may be: from the float64 result less and plus
// the bound of float32's error at that step to the same at both ends. Rounding never reverses an order: the
// ends rounded are the ends of what the rounded value may be. Away from ties both ends are one number, and
// the device must give it.
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
};
using ValueRanges = std::vector<ValueRange>;

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

inline ValueRanges exact_ranges(std::span<const float> x) {
    ValueRanges out;
    for (const float value : x) {
        out.push_back({value, value});
    }
    return out;
}

// RMSNorm with a rounding before the weight and one after it. error: of the factor before rounding, relative.
inline void range_norm(ValueRanges& x, std::span<const float> weight, double eps, double error) {
    double least = 0;
    double most = 0;
    for (const ValueRange& value : x) {
        least += smallest_magnitude(value) * smallest_magnitude(value);
        most += largest_magnitude(value) * largest_magnitude(value);
    }
    const double count = static_cast<double>(x.size());
    const double high = (1 + error) / std::sqrt(least / count + eps);
    const double low = (1 - error) / std::sqrt(most / count + eps);
    for (size_t i = 0; i < x.size(); ++i) {
        const ValueRange scaled{x[i].low * (x[i].low < 0 ? high : low),
                                x[i].high * (x[i].high < 0 ? low : high)};
        x[i] = rounded_bf16(rounded_bf16(scaled) * weight[i]);
    }
}

// The scale of values that have one of their own: the largest magnitude over e4m3's largest.
inline ValueRange range_scale(const ValueRanges& x) {
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

// Where a format's last place lies.
struct LastPlace {
    int bits = 0;  // behind the first one
    int exponent_min = 0;

    double unit(double value) const {
        return std::ldexp(1, std::max(value == 0 ? exponent_min : std::ilogb(value), exponent_min) - bits);
    }
};
inline constexpr LastPlace kBf16LastPlace{7, -126};
inline constexpr LastPlace kE4m3LastPlace{3, -6};
// A bfloat16 divided by a number: one of its units may be two of the quotient's.
inline constexpr LastPlace kScaleLastPlace{6, -126};

// What an output may hold, element by element; NaN: nobody writes it.
class OutputRange {
  public:
    OutputRange(int64_t count, const LastPlace& last_place)
        : low(static_cast<size_t>(count), NAN), high(low), last_place_(last_place) {}

    // Elements from `first` on, made from each other: none may be wider than two units in the last place of
    // the largest. (One step of a value becomes the same step of what is made from it, however small that
    // is.)
    void set(int64_t first, std::span<const ValueRange> values) {
        double largest = 0;
        for (const ValueRange& value : values) {
            largest = std::fmax(largest, largest_magnitude(value));
        }
        for (const ValueRange& value : values) {
            const auto place = static_cast<size_t>(first++);
            low[place] = static_cast<float>(value.low);
            high[place] = static_cast<float>(value.high);
            const double width = value.high - value.low;
            wide_ += width > 0 ? 1 : 0;
            wider_ += width > last_place_.unit(largest_magnitude(value)) ? 1 : 0;
            too_wide_ += width > 2 * last_place_.unit(largest) ? 1 : 0;
        }
        written_ += static_cast<int64_t>(values.size());
    }
    void set(int64_t place, const ValueRange& value) { set(place, {&value, 1}); }

    // A reference that compares nothing: more than a twentieth of what is written may be two numbers or more,
    // or a two hundredth more than one unit in the last place.
    bool is_vacuous() const {
        return wide_ > 20 + written_ / 20 || wider_ > 20 + written_ / 200 || too_wide_ > 0;
    }

    std::vector<float> low, high;

  private:
    LastPlace last_place_;
    int64_t written_ = 0;
    int64_t wide_ = 0;
    int64_t wider_ = 0;
    int64_t too_wide_ = 0;
};

// Every element must lie in its range.
inline OpError compare_range(std::span<const float> got, const OutputRange& want) {
    OpError error;
    error.compared = static_cast<int64_t>(want.low.size());
    if (got.size() != want.low.size() || want.is_vacuous()) {
        error.mismatches = error.compared + 1;
        return error;
    }
    for (size_t i = 0; i < got.size(); ++i) {
        const double g = static_cast<double>(got[i]);
        const double low = static_cast<double>(want.low[i]);
        const double high = static_cast<double>(want.high[i]);
        if (std::isnan(low)) {
            error.mismatches += std::isnan(g) ? 0 : 1;
        } else if (!(g >= low && g <= high)) {
            const double difference = std::isnan(g) ? INFINITY : std::fmax(low - g, g - high);
            error.max_abs = std::fmax(error.max_abs, difference);
            error.max_rel = std::fmax(error.max_rel, difference / std::fmax(std::fabs(low), 1e-6));
            ++error.mismatches;
        }
    }
    return error;
}

}  // namespace tessera

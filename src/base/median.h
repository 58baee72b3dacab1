// The median of measured times: robust against the odd slow one.
#pragma once

#include <algorithm>
#include <cstddef>
#include <vector>

namespace tessera {

// Of an even number of values the larger middle one. REQUIRES: at least one value.
inline double median(std::vector<double> values) {
    const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
    std::nth_element(values.begin(), middle, values.end());
    return *middle;
}

}  // namespace tessera

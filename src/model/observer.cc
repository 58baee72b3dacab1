#include "model/observer.h"

#include <algorithm>
#include <bit>
#include <cmath>

#include "base/check.h"

namespace tessera {

void Magnitudes::add(const float* x, int64_t count) {
    for (int64_t i = 0; i < count; ++i) {
        const uint32_t bits = std::bit_cast<uint32_t>(x[i]) & 0x7FFFFFFFu;
        if (bits == 0) {
            continue;
        }
        ++bins_[bits >> kShift];
        ++count_;
        const float magnitude = std::bit_cast<float>(bits);
        if (std::isfinite(magnitude)) {
            largest_ = std::max(largest_, magnitude);
        } else {
            finite_ = false;
        }
    }
}

float Magnitudes::quantile(double share) const {
    check(share > 0 && share <= 1, "quantile: the share must be in (0, 1]");
    const auto wanted = static_cast<uint64_t>(std::ceil(share * static_cast<double>(count_)));
    uint64_t below = 0;
    for (size_t bin = 0; bin < bins_.size(); ++bin) {
        below += bins_[bin];
        if (below >= wanted) {
            return std::min(largest_, std::bit_cast<float>(static_cast<uint32_t>(bin + 1) << kShift));
        }
    }
    return largest_;
}

}  // namespace tessera

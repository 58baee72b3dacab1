#include "server/recent_window.h"

#include <algorithm>
#include <cmath>
#include <functional>
#include <numeric>

namespace tessera {
namespace {

constexpr double kSmallest_s = 1e-5;

int64_t second_of(TimeNs now) {
    return now / kNsPerSecond;
}

}  // namespace

void RecentRate::add(int64_t n, TimeNs now) {
    const int64_t second = second_of(now);
    Slot& slot = slots_[static_cast<size_t>(second % kSeconds)];
    if (slot.second != second) {
        slot = {.second = second, .n = 0};
    }
    slot.n += n;
    first_second_ = first_second_ < 0 ? second : first_second_;
}

double RecentRate::per_second(TimeNs now) const {
    const int64_t second = second_of(now);
    // Whole seconds only; right after the first event the running one must do.
    if (first_second_ < 0 || second == first_second_) {
        const Slot& slot = slots_[static_cast<size_t>(second % kSeconds)];
        return slot.second == second ? static_cast<double>(slot.n) : 0.0;
    }
    const int64_t whole = std::min<int64_t>(kSeconds - 1, second - first_second_);
    int64_t n = 0;
    for (const Slot& slot : slots_) {
        n += slot.second < second && slot.second >= second - whole ? slot.n : 0;
    }
    return static_cast<double>(n) / static_cast<double>(whole);
}

RecentDurations::RecentDurations() : slots_(kWindowSeconds) {}

void RecentDurations::add(double duration_s, TimeNs now) {
    const int64_t second = second_of(now);
    Slot& slot = slots_[static_cast<size_t>(second % kWindowSeconds)];
    if (slot.second != second) {
        slot.second = second;
        slot.counts.fill(0);
    }
    const double octaves = std::log2(std::max(duration_s, kSmallest_s) / kSmallest_s);
    const auto bucket = static_cast<int64_t>(octaves * kBucketsPerOctave);
    ++slot.counts[static_cast<size_t>(std::clamp<int64_t>(bucket, 0, kBuckets - 1))];
}

std::array<int64_t, RecentDurations::kBuckets> RecentDurations::merged(TimeNs now) const {
    const int64_t second = second_of(now);
    std::array<int64_t, kBuckets> sum{};
    for (const Slot& slot : slots_) {
        if (slot.second >= 0 && slot.second > second - kWindowSeconds && slot.second <= second) {
            std::ranges::transform(sum, slot.counts, sum.begin(), std::plus<>());
        }
    }
    return sum;
}

int64_t RecentDurations::count(TimeNs now) const {
    const auto sum = merged(now);
    return std::accumulate(sum.begin(), sum.end(), int64_t{0});
}

double RecentDurations::quantile(double q, TimeNs now) const {
    const auto sum = merged(now);
    const int64_t total = std::accumulate(sum.begin(), sum.end(), int64_t{0});
    if (total == 0) {
        return 0;
    }
    const auto rank = static_cast<int64_t>(q * static_cast<double>(total - 1));
    int64_t seen = 0;
    for (int bucket = 0; bucket < kBuckets; ++bucket) {
        seen += sum[static_cast<size_t>(bucket)];
        if (seen > rank) {
            return kSmallest_s * std::exp2((bucket + 0.5) / kBucketsPerOctave);
        }
    }
    return 0;
}

}  // namespace tessera

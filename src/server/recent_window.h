// What has happened in the last seconds: rates and quantiles for the live panel. Bounded memory, no locks
// (the owner's).
#pragma once

#include <array>
#include <cstdint>
#include <vector>

#include "base/clock.h"

namespace tessera {

inline constexpr int kWindowSeconds = 60;

// Events a second, over the last few whole seconds.
class RecentRate {
  public:
    void add(int64_t n, TimeNs now);
    double per_second(TimeNs now) const;

  private:
    static constexpr int kSeconds = 6;  // the running second and five whole ones
    struct Slot {
        int64_t second = -1;
        int64_t n = 0;
    };
    std::array<Slot, kSeconds> slots_{};
    int64_t first_second_ = -1;
};

// Quantiles of durations over the last minute, to within 9 % (buckets by 2^(1/8), from 10 us to 1000 s).
class RecentDurations {
  public:
    RecentDurations();
    void add(double duration_s, TimeNs now);
    int64_t count(TimeNs now) const;
    // The q-quantile (0 to 1) in seconds; 0 without samples.
    double quantile(double q, TimeNs now) const;

  private:
    static constexpr int kBucketsPerOctave = 8;
    static constexpr int kBuckets = 27 * kBucketsPerOctave;
    struct Slot {
        int64_t second = -1;
        std::array<uint32_t, kBuckets> counts{};
    };
    std::array<int64_t, kBuckets> merged(TimeNs now) const;

    std::vector<Slot> slots_;  // one a second
};

}  // namespace tessera

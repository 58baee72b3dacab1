// Recording into the engine's histograms.
#pragma once

#include <algorithm>
#include <iterator>

#include "base/clock.h"
#include "engine/engine.h"

namespace tessera {

inline void record(StageHistogram& histogram, TimeNs duration) {
    const auto us = static_cast<uint64_t>(duration / 1000);
    int bucket = 0;
    while (bucket + 1 < StageHistogram::kBuckets && (us >> (bucket + 1)) != 0) {
        ++bucket;
    }
    ++histogram.bucket[bucket];
    ++histogram.count;
    histogram.sum_s += seconds(duration);
}

inline void record(TokenHistogram& histogram, int64_t tokens) {
    const auto* const bound = std::ranges::lower_bound(TokenHistogram::kBounds, tokens);
    ++histogram.bucket[bound - std::begin(TokenHistogram::kBounds)];
    ++histogram.count;
    histogram.sum += tokens;
}

// Times its scope into a histogram.
class StageTimer {
  public:
    explicit StageTimer(StageHistogram& histogram) : histogram_(histogram), start_(now_ns()) {}
    ~StageTimer() { record(histogram_, now_ns() - start_); }
    StageTimer(const StageTimer&) = delete;
    StageTimer& operator=(const StageTimer&) = delete;

  private:
    StageHistogram& histogram_;
    const TimeNs start_;
};

}  // namespace tessera

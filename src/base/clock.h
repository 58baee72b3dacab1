// The one clock: monotonic nanoseconds. Pure layers (cache, sched) take the time as an argument instead.
#pragma once

#include <chrono>
#include <cstdint>

namespace tessera {

using TimeNs = int64_t;

inline TimeNs now_ns() {
    return std::chrono::duration_cast<std::chrono::nanoseconds>(
               std::chrono::steady_clock::now().time_since_epoch())
        .count();
}

inline constexpr TimeNs kNsPerSecond = 1'000'000'000;
inline constexpr TimeNs kNsPerMs = 1'000'000;

inline double seconds(TimeNs ns) {
    return static_cast<double>(ns) * 1e-9;
}

}  // namespace tessera

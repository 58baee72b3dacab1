// StepClock: when each step began and ended on the device, from events.
#pragma once

#include <array>
#include <cstdint>

#include "device/cuda/stream.h"

namespace tessera {

struct StepTiming {
    double busy_us = 0;  // from the step's first work to its end
    double gap_us = 0;   // from the end of the step before it to its first work; 0 for the first step
};

class StepClock {
  public:
    // Before the step's first work is entered, and after its last.
    void begin(cudaStream_t stream);
    void end(cudaStream_t stream);
    // Blocks until the oldest step not yet waited for has ended. REQUIRES: at most two steps have not been
    StepTiming wait();

  private:
    // Two steps in flight, and the one before them.
    static constexpr size_t kSteps = 4;
    struct Pair {
        Event begun{Event::Timing::kOn};
        Event ended{Event::Timing::kOn};
    };
    Pair& pair(uint64_t step) { return pairs_[step % kSteps]; }

    std::array<Pair, kSteps> pairs_;
    uint64_t entered_ = 0;
    uint64_t waited_ = 0;
};

}  // namespace tessera

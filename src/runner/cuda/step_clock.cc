#include "runner/cuda/step_clock.h"

#include "base/check.h"

namespace tessera {

void StepClock::begin(cudaStream_t stream) {
    pair(entered_).begun.record(stream);
}

void StepClock::end(cudaStream_t stream) {
    pair(entered_++).ended.record(stream);
    check(entered_ - waited_ < kSteps, "StepClock: too many steps in flight");
}

StepTiming StepClock::wait() {
    const Pair& step = pair(waited_);
    step.ended.wait();
    StepTiming timing{.busy_us = Event::elapsed_us(step.begun, step.ended)};
    if (waited_ > 0) {
        timing.gap_us = Event::elapsed_us(pair(waited_ - 1).ended, step.begun);
    }
    ++waited_;
    return timing;
}

}  // namespace tessera

// Runner: executes step plans in order, asynchronously. The engine's only way to the model; the simulator
// puts a fake one in its place.
#pragma once

#include "types/step_plan.h"

namespace tessera {

// Thread rule: launch() and collect() are called by the engine's loop thread alone.
class Runner {
  public:
    virtual ~Runner() = default;
    // Queues the plan and returns at once. REQUIRES: fewer than max_in_flight() plans are uncollected.
    virtual void launch(StepPlan plan) = 0;
    // Waits for the oldest uncollected plan and returns its result. REQUIRES: one was launched.
    virtual StepResult collect() = 0;
    virtual int max_in_flight() const = 0;
};

}  // namespace tessera

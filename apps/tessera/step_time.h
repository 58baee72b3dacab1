// How long a step takes on this machine: what lets the scheduler keep decoding streams at their pace beside a
// long prefill.
#pragma once

#include <functional>

#include "model/hy3_model.h"
#include "sched/scheduler.h"

namespace tessera {

// Times a short prefill of the model (some milliseconds), and gives a pure function: the step's multiply-adds
// over the rate reached there. A prefill's rate is the right one to judge prefill chunks by, which is what it
// is for.
std::function<double(const StepShape&)> measure_step_time(Hy3Model& model, int32_t tokens_max);

}  // namespace tessera

// Whether the host keeps the device busy: requests through the engine's asynchronous loop, and the device's
// own account of its steps.
#pragma once

#include "runner/cuda/cuda_runner.h"

namespace tessera {

struct IdleHost {
    int32_t batch = 0;
    int32_t steps = 0;          // of decode alone, with all requests running
    double step_us = 0;         // mean, from the step's first work on the device to its end
    double period_us = 0;       // mean, from a step's end to the next one's
    double longest_gap_us = 0;  // between two such steps
    double alone_us = 0;        // the same step replayed without a host
    double busy_share() const { return step_us / period_us; }
};

inline constexpr int32_t kIdlePromptTokens = 64;

// `batch` requests of `tokens` tokens each. REQUIRES: nothing in flight, `batch` slots, and steps of
// batch * kIdlePromptTokens tokens
Result<IdleHost> measure_idle_host(CudaRunner& runner, const ModelConfig& config, int32_t batch,
                                   int32_t tokens);

}  // namespace tessera

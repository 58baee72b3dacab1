// CudaRunner: executes step plans on a CUDA device. launch() stages a plan's inputs in page-locked memory and
// enters the whole step into a stream; collect() waits for the oldest step's event. A slot's last token and
// sampling state stay on the device, so a plan is launched before the result of the one before it is known.
// Steps of decode rows alone are replayed from graphs captured at start.
#pragma once

#include <memory>

#include "model/cuda/hy3_cuda_model.h"
#include "model/cuda/pass_probes.h"
#include "runner/cuda/step_clock.h"
#include "runner/runner.h"

namespace tessera {

struct CudaRunnerConfig {
    int32_t num_pages = 0;     // 0: all that the model's memory budget has left
    int32_t max_num_seqs = 0;  // slots, and the most rows in a plan; at most the model's sequences_max
    int32_t max_num_batched_tokens = 0;  // at most the model's tokens_max
    // Pages newly given to a slot are filled with NaN (contract: slots.poison).
    bool poison = false;
};

// One step's launches, replayed without a host between them.
struct StepProbe {
    double step_us = 0;          // median
    double marked_us = 0;        // median, with an event after each operator
    OperatorTimes operators{};   // medians, from those events
    double experts_touched = 0;  // mean, summed over the layers
};

class CudaRunner : public Runner {
  public:
    // Takes its memory from the model's budget and seals it. The model must outlive the runner, and nobody
    // else may use it meanwhile.
    static Result<std::unique_ptr<CudaRunner>> create(CudaModel& model, const CudaRunnerConfig& config);

    virtual int32_t num_pages() const = 0;
    // Of the step collected last.
    virtual StepTiming last_timing() const = 0;

    // For benchmarks, with nothing in flight.
    // Fills all pages with random K and V.
    virtual void fill_pages(uint64_t seed) = 0;
    // Replays the step launched last, over the same inputs: the same positions, each time with the slots'
    // newest tokens. It takes some device memory of its own for the graphs.
    virtual Result<StepProbe> probe(int32_t replays) = 0;
};

}  // namespace tessera

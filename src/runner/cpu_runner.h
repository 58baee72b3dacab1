// CpuRunner: executes step plans on a compute thread of its own, with the model's kernels spread over a
// thread pool.
#pragma once

#include <memory>

#include "base/status.h"
#include "model/hy3_model.h"
#include "runner/runner.h"

namespace tessera {

struct CpuRunnerConfig {
    int32_t num_pages = 0;
    int32_t max_num_seqs = 0;            // slots, and the most rows in a plan
    int32_t max_num_batched_tokens = 0;  // at most the model's tokens_max
    int32_t draft_tokens_max = 0;
    // Pages newly given to a slot are filled with NaN (contract: slots.poison).
    bool poison = false;
};

// The model and the thread pool must outlive the runner, and nobody else may use them meanwhile.
// Refused where its memory does not fit.
Result<std::unique_ptr<Runner>> make_cpu_runner(Hy3Model& model, ThreadPool& threads,
                                                const CpuRunnerConfig& config);

}  // namespace tessera

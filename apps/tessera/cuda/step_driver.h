// StepDriver: plans for a CUDA runner without an engine, to time its steps. Sequences lie in pages of random
// content in random order, as if their prefix had been cached.
#pragma once

#include <vector>

#include "ops/op_case.h"
#include "runner/cuda/cuda_runner.h"

namespace tessera {

struct DrivenSteps {
    double us = 0;  // decode: the median step; prefill: the median prompt, gaps between its chunks included
    double gap_us = 0;  // decode: the longest gap between steps
    StepProbe probe;    // decode: of the last step; prefill: added up over the chunks
    bool probed = false;
};

struct DrivenPrefill {
    int32_t tokens = 0;
    int32_t chunk = 0;
    int32_t rounds = 0;
    int32_t probe_replays = 0;  // 0: no probe
};

class StepDriver {
  public:
    StepDriver(CudaRunner& runner, int64_t vocab);

    // Pages that a measurement takes; it fits when they are no more than the runner's.
    static int64_t decode_pages(int32_t batch, int32_t context, int32_t steps);
    static int64_t prefill_pages(int32_t tokens);

    // `steps` steps of `batch` rows, their contexts centred on `context`.
    Result<DrivenSteps> decode(int32_t batch, int32_t context, int32_t steps);
    Result<DrivenSteps> prefill(const DrivenPrefill& prefill);

  private:
    void launch(StepPlan plan);
    StepTiming collect();
    std::vector<PageId> take_pages(int64_t count);
    StepPlan tenants(int32_t count, int32_t position, int64_t pages_each);
    StepPlan decode_plan(int32_t batch, int32_t position) const;

    CudaRunner& runner_;
    const int64_t vocab_;
    OpRandom random_;
    std::vector<PageId> pages_;  // all of the pool's, in random order
    size_t pages_taken_ = 0;
    uint32_t generation_ = 0;
    uint64_t step_ = 0;
};

}  // namespace tessera

// Timing of operator cases on the device.
#pragma once

#include <algorithm>

#include <cuda_runtime_api.h>

#include "ops/cuda/cuda_case.h"

namespace tessera {

// What an H200 reaches: a large copy (read and written bytes counted) and large matrix products on random
// data. That of float32 is not measured: nine tenths of the data sheet's 67 TFLOP/s.
struct CudaRates {
    double bytes_per_s = 4.27e12;
    double float32_flops = 60e12;
    double bf16_flops = 800e12;
    double fp8_flops = 1465e12;
};

struct CudaTiming {
    double us = 0;  // median; each launch works on a set of its own
    double p10_us = 0;
    double p90_us = 0;
    double hot_us = 0;    // median; every launch works on the same set
    double burst_us = 0;  // cold, after a pause: before the power limit slows the clock; 0: not measured
};

// Copies of a case's data that together are over three times the level-2 cache, within what is sensible to
// make.
int cuda_case_sets(const CudaOpCase& op_case, int64_t l2_bytes);

// Replays graphs of launches, long ones for 0.15 s each way; waits for them. Long launches whose
// operations take half of the floor or more have a burst too.
CudaTiming time_cuda_case(const CudaCaseRun& run, cudaStream_t stream);

// The least time that the case can take.
struct CudaFloor {
    double bytes_us = 0;  // its bytes over the bandwidth
    double flops_us = 0;  // its operations over the unit's rate
    double us() const { return std::max(bytes_us, flops_us); }
};
CudaFloor cuda_floor(const CudaCaseRun& run, const CudaRates& rates);

}  // namespace tessera

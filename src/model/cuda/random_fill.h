// Random elements made on the device: for models without a checkpoint.
#pragma once

#include <cstdint>

#include <cuda_runtime_api.h>

#include "base/dtype.h"

namespace tessera {

// Element i depends on (seed, i) alone: mean + deviation * (a sum of four uniform numbers, of variance 1,
// within 3.47), rounded to the dtype.
struct RandomFillArgs {
    void* to = nullptr;  // [count], 16-byte aligned
    int64_t count = 0;
    DType dtype = DType::kBFloat16;  // kBFloat16, kFloat8E4M3 or kFloat32
    uint64_t seed = 0;
    float mean = 0;
    float deviation = 1;
};
void random_fill_cuda(cudaStream_t stream, const RandomFillArgs& args);

}  // namespace tessera

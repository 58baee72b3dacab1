// The kernel for few rows. Private to this operator.
#pragma once

#include "ops/sample/cuda/sample_cuda.h"

namespace tessera {

inline constexpr int64_t kSampleFewRows = 16;

int64_t sample_few_exchange_bytes(int64_t vocab, int64_t rows);
void sample_few_prepare();
// False where there are too many rows or tokens: nothing has been done.
bool sample_few(cudaStream_t stream, const SampleCudaArgs& args);

}  // namespace tessera

// The products of few rows that do without cuBLASLt: at decode the library's kernels take 1.3 to 2.4 times
// what reading the weights takes.
#pragma once

#include <cuda_runtime_api.h>

#include "ops/linear/cuda/linear_cuda.h"

namespace tessera {

// Whether skinny_linear_cuda() takes the product and is the faster one: at most 64 rows, and no more columns
// than the multiprocessors hold at once.
bool skinny_linear_serves(const LinearCudaArgs& args);
// Takes what skinny_linear_cuda() needs from the device. Once, before the first call.
void skinny_linear_prepare();
// As LinearCuda::run(). The bits of a row do not depend on the other rows nor on their number.
void skinny_linear_cuda(cudaStream_t stream, const LinearCudaArgs& args);

}  // namespace tessera

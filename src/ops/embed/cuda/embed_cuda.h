// embed on the device: rows of the embedding table, bfloat16.
#pragma once

#include <cstdint>

#include <cuda_bf16.h>
#include <cuda_runtime_api.h>

namespace tessera {

struct EmbedCudaArgs {
    const __nv_bfloat16* table = nullptr;  // [vocab, width], row-major, 16-byte aligned
    int64_t vocab = 0;
    int64_t width = 0;                // a multiple of 8
    const int32_t* tokens = nullptr;  // [rows]; an id outside [0, vocab), as padding has, gives zeros
    int64_t rows = 0;
    __nv_bfloat16* y = nullptr;  // [rows, width], 16-byte aligned
    int64_t y_stride = 0;        // elements between rows, a multiple of 8
};

void embed_cuda(cudaStream_t stream, const EmbedCudaArgs& args);

}  // namespace tessera

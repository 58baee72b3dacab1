// Small kernels of a forward pass that are no operators.
#pragma once

#include <cstddef>
#include <cstdint>

#include <cuda_bf16.h>
#include <cuda_runtime_api.h>

namespace tessera {

// For every token in the last slot of its page: the page's trailer becomes its final-normed hidden state,
// float32.
struct TrailerArgs {
    const __nv_bfloat16* hidden = nullptr;  // [tokens, width]
    int64_t tokens = 0;
    int64_t width = 0;
    const int32_t* positions = nullptr;    // [tokens]; < 0 is padding
    const int32_t* sequences = nullptr;    // [tokens]: the row of the page table
    const int32_t* page_tables = nullptr;  // [.., pages_max]
    int32_t pages_max = 0;
    std::byte* pool = nullptr;
    int64_t page_stride = 0;
    int64_t trailer_offset = 0;
};
void write_trailers_cuda(cudaStream_t stream, const TrailerArgs& args);

// touched[e] = 1 for every expert among `chosen`; ids outside [0, experts) are passed over.
struct MarkExpertsArgs {
    const int32_t* chosen = nullptr;  // [count]
    int64_t count = 0;
    int64_t experts = 0;
    uint8_t* touched = nullptr;  // [experts]; page-locked host memory will do
};
void mark_experts_cuda(cudaStream_t stream, const MarkExpertsArgs& args);

}  // namespace tessera

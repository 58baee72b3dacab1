#include "base/check.h"
#include "device/cuda/cuda_check.h"
#include "model/cuda/step_kernels.h"
#include "types/page_format.h"

namespace tessera {
namespace {

constexpr int kThreads = 256;
constexpr int64_t kExpertsMax = 1024;

// One block a token; 1 of 64 has something to do. Floor: 6 bytes an element written over 4.27 TB/s.
__global__ void trailer_kernel(TrailerArgs args) {
    const int64_t token = blockIdx.x;
    const int32_t position = args.positions[token];
    if (position < 0 || position % kPageTokens != kPageTokens - 1) {
        return;
    }
    const int64_t row = args.sequences[token];
    const int64_t page = args.page_tables[row * args.pages_max + position / kPageTokens];
    auto* to = reinterpret_cast<float*>(args.pool + page * args.page_stride + args.trailer_offset);
    for (int64_t i = threadIdx.x; i < args.width; i += kThreads) {
        to[i] = __bfloat162float(args.hidden[token * args.width + i]);
    }
}

// Benchmarks only: one block, flags in shared memory so that each leaves the device once.
__global__ void mark_experts_kernel(MarkExpertsArgs args) {
    __shared__ uint8_t touched[kExpertsMax];
    for (int64_t e = threadIdx.x; e < args.experts; e += kThreads) {
        touched[e] = 0;
    }
    __syncthreads();
    for (int64_t i = threadIdx.x; i < args.count; i += kThreads) {
        const int32_t expert = args.chosen[i];
        if (expert >= 0 && expert < args.experts) {
            touched[expert] = 1;
        }
    }
    __syncthreads();
    for (int64_t e = threadIdx.x; e < args.experts; e += kThreads) {
        if (touched[e] != 0) {
            args.touched[e] = 1;
        }
    }
}

}  // namespace

void mark_experts_cuda(cudaStream_t stream, const MarkExpertsArgs& args) {
    check(args.experts <= kExpertsMax, "mark_experts: at most 1024 experts");
    mark_experts_kernel<<<1, kThreads, 0, stream>>>(args);
    cuda_check_launch();
}

void write_trailers_cuda(cudaStream_t stream, const TrailerArgs& args) {
    trailer_kernel<<<static_cast<unsigned>(args.tokens), kThreads, 0, stream>>>(args);
    cuda_check_launch();
}

}  // namespace tessera

#include "base/check.h"
#include "device/cuda/cuda_check.h"
#include "ops/embed/cuda/embed_cuda.h"

namespace tessera {
namespace {

constexpr int kThreads = 128;
constexpr int64_t kVector = 8;  // bfloat16 in 16 bytes

// Roofline: 4 bytes of traffic for each element, no arithmetic. A block copies one row.
__global__ void __launch_bounds__(kThreads) embed_kernel(EmbedCudaArgs args) {
    const int64_t row = blockIdx.x;
    const int32_t token = args.tokens[row];
    const bool known = token >= 0 && token < args.vocab;
    const uint4* from = reinterpret_cast<const uint4*>(args.table + (known ? token : 0) * args.width);
    uint4* to = reinterpret_cast<uint4*>(args.y + row * args.y_stride);
    for (int64_t i = threadIdx.x; i < args.width / kVector; i += kThreads) {
        to[i] = known ? from[i] : make_uint4(0, 0, 0, 0);
    }
}

}  // namespace

void embed_cuda(cudaStream_t stream, const EmbedCudaArgs& args) {
    check(args.width % kVector == 0 && args.y_stride % kVector == 0, "embed: width must be a multiple of 8");
    if (args.rows == 0) {
        return;
    }
    embed_kernel<<<static_cast<unsigned>(args.rows), kThreads, 0, stream>>>(args);
    cuda_check_launch();
}

}  // namespace tessera

#include "base/check.h"
#include "device/cuda/cuda_check.h"
#include "ops/common/cuda/convert.cuh"
#include "ops/common/cuda/dependent_launch.cuh"
#include "ops/linear/cuda/linear_cuda.h"

namespace tessera {
namespace {

constexpr int kThreads = 128;
constexpr int kPerThread = 8;

// Roofline: 3 bytes an element; 64 x 8192 take 0.4 us of it, below the launch itself. So small threads, many
// blocks, and no division: each is eight operations.
__global__ void __launch_bounds__(kThreads)
    quantize_kernel(const __nv_bfloat16* x, int64_t count, cuda::Divider divide, uint2* y) {
    const int64_t index = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
    cuda::let_next_kernel_start();
    cuda::wait_for_previous_kernel();
    if (index * kPerThread >= count) {
        return;
    }
    float v[kPerThread];
    cuda::load_bf16x8(x + index * kPerThread, v);
#pragma unroll
    for (float& value : v) {
        value = divide.for_e4m3(value);
    }
    y[index] =
        make_uint2(cuda::pack_e4m3x4(v[0], v[1], v[2], v[3]), cuda::pack_e4m3x4(v[4], v[5], v[6], v[7]));
}

}  // namespace

void quantize_cuda(cudaStream_t stream, const QuantizeCudaArgs& args) {
    check(args.count >= 0 && args.count % 16 == 0, "quantize: the count must be a multiple of 16");
    const int64_t blocks = (args.count / kPerThread + kThreads - 1) / kThreads;
    if (blocks == 0) {
        return;
    }
    cuda_check(cuda::launch_dependent(
        {.grid = dim3(static_cast<unsigned>(blocks)), .threads = kThreads, .stream = stream}, quantize_kernel,
        static_cast<const __nv_bfloat16*>(args.x), args.count, cuda::Divider{args.scale, 1 / args.scale},
        static_cast<uint2*>(args.y)));
}

}  // namespace tessera

#include "base/check.h"
#include "device/cuda/cuda_check.h"
#include "ops/common/cuda/convert.cuh"
#include "ops/common/cuda/dependent_launch.cuh"
#include "ops/linear/cuda/linear_cuda.h"

namespace tessera {
namespace {

constexpr int kThreads = 256;
constexpr int kPerThread = 16;

// Roofline: 3 bytes an element; 64 x 4096 take 0.2 us of it, below the launch itself.
__global__ void __launch_bounds__(kThreads)
    quantize_kernel(const __nv_bfloat16* x, int64_t count, float divisor, uint4* y) {
    const int64_t index = static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x;
    cuda::let_next_kernel_start();
    cuda::wait_for_previous_kernel();
    if (index * kPerThread >= count) {
        return;
    }
    float low[8];
    float high[8];
    cuda::load_bf16x8(x + index * kPerThread, low);
    cuda::load_bf16x8(x + index * kPerThread + 8, high);
    const auto narrow = [divisor](const float* v) {
        return cuda::pack_e4m3x4(__fdiv_rn(v[0], divisor), __fdiv_rn(v[1], divisor), __fdiv_rn(v[2], divisor),
                                 __fdiv_rn(v[3], divisor));
    };
    y[index] = make_uint4(narrow(low), narrow(low + 4), narrow(high), narrow(high + 4));
}

}  // namespace

void quantize_cuda(cudaStream_t stream, const QuantizeCudaArgs& args) {
    check(args.count >= 0 && args.count % kPerThread == 0, "quantize: the count must be a multiple of 16");
    const int64_t blocks = (args.count / kPerThread + kThreads - 1) / kThreads;
    if (blocks == 0) {
        return;
    }
    cuda_check(cuda::launch_dependent(
        {.grid = dim3(static_cast<unsigned>(blocks)), .threads = kThreads, .stream = stream}, quantize_kernel,
        static_cast<const __nv_bfloat16*>(args.x), args.count, args.scale, static_cast<uint4*>(args.y)));
}

}  // namespace tessera

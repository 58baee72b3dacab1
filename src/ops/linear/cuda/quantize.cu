#include "base/check.h"
#include "device/cuda/cuda_check.h"
#include "ops/common/cuda/convert.cuh"
#include "ops/common/cuda/dependent_launch.cuh"
#include "ops/linear/cuda/linear_cuda.h"

namespace tessera {
namespace {

constexpr int64_t kManyElements = 1 << 21;

// Roofline: 3 bytes an element; 64 x 8192 take 0.4 us of it, below the launch itself. So few elements want
// small threads and many blocks, many elements fewer and larger ones; neither a division, which is eight
// operations.
template <int Pieces>
__global__ void __launch_bounds__(128 * Pieces)
    quantize_kernel(const __nv_bfloat16* x, int64_t pieces, cuda::Divider divide, uint2* y) {
    const int64_t first = (static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x) * Pieces;
    cuda::let_next_kernel_start();
    cuda::wait_for_previous_kernel();
    if (first >= pieces) {
        return;
    }
    float v[Pieces][8];
    uint32_t codes[2 * Pieces];
#pragma unroll
    for (int piece = 0; piece < Pieces; ++piece) {
        cuda::load_bf16x8(x + (first + piece) * 8, v[piece]);
    }
#pragma unroll
    for (int i = 0; i < 2 * Pieces; ++i) {
        const float* from = v[i / 2] + i % 2 * 4;
        codes[i] = cuda::pack_e4m3x4(divide.for_e4m3(from[0]), divide.for_e4m3(from[1]),
                                     divide.for_e4m3(from[2]), divide.for_e4m3(from[3]));
    }
    if constexpr (Pieces == 2) {
        *reinterpret_cast<uint4*>(y + first) = make_uint4(codes[0], codes[1], codes[2], codes[3]);
    } else {
        y[first] = make_uint2(codes[0], codes[1]);
    }
}

template <int Pieces>
void launch_quantize(cudaStream_t stream, const QuantizeCudaArgs& args) {
    constexpr int kThreads = 128 * Pieces;
    const int64_t pieces = args.count / 8;
    const int64_t blocks = (pieces / Pieces + kThreads - 1) / kThreads;
    cuda_check(cuda::launch_dependent(
        {.grid = dim3(static_cast<unsigned>(blocks)), .threads = kThreads, .stream = stream},
        quantize_kernel<Pieces>, static_cast<const __nv_bfloat16*>(args.x), pieces,
        cuda::Divider{args.scale, 1 / args.scale}, static_cast<uint2*>(args.y)));
}

}  // namespace

void quantize_cuda(cudaStream_t stream, const QuantizeCudaArgs& args) {
    check(args.count >= 0 && args.count % 16 == 0, "quantize: the count must be a multiple of 16");
    if (args.count == 0) {
        return;
    }
    args.count < kManyElements ? launch_quantize<1>(stream, args) : launch_quantize<2>(stream, args);
}

}  // namespace tessera

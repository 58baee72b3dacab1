#include <algorithm>

#include "base/check.h"
#include "device/cuda/cuda_check.h"
#include "ops/common/cuda/convert.cuh"
#include "ops/common/cuda/reduce.cuh"
#include "ops/rms_norm/cuda/rms_norm_cuda.h"

namespace tessera {
namespace {

using namespace cuda;

constexpr int kThreadsMax = 512;
constexpr int64_t kVector = 8;  // bfloat16 in 16 bytes

__device__ __forceinline__ void store_outputs(const RmsNormCudaArgs& args, int64_t row, int64_t column,
                                              const float (&y)[kVector]) {
    if (args.y != nullptr) {
        store_bf16x8(y, args.y + row * args.y_stride + column);
    }
    if (args.y8 != nullptr) {
        float q[kVector];
#pragma unroll
        for (int i = 0; i < kVector; ++i) {
            q[i] = __fdiv_rn(y[i], args.y8_scale);
        }
        *reinterpret_cast<uint2*>(args.y8 + row * args.y8_stride + column) =
            make_uint2(pack_e4m3x4(q[0], q[1], q[2], q[3]), pack_e4m3x4(q[4], q[5], q[6], q[7]));
    }
}

// Roofline: reads x (and add), writes y (and x): 4 to 8 bytes an element against about 5 operations, so
// bandwidth. A block holds one row in registers, Vectors pieces of 8 elements in each thread.
template <int Vectors>
__global__ void __launch_bounds__(kThreadsMax, 1) rms_norm_kernel(RmsNormCudaArgs args) {
    __shared__ float shared[kWarp];
    const int64_t row = blockIdx.x;
    const int64_t from = args.x_rows == nullptr ? row : args.x_rows[row];
    if (from < 0) {
        return;
    }
    float v[Vectors][kVector];
    float squares = 0;
#pragma unroll
    for (int i = 0; i < Vectors; ++i) {
        const int64_t column = (threadIdx.x + static_cast<int64_t>(i) * blockDim.x) * kVector;
        if (column >= args.width) {
            break;
        }
        __nv_bfloat16* x = args.x + from * args.x_stride + column;
        load_bf16x8(x, v[i]);
        if (args.add != nullptr) {
            float add[kVector];
            load_bf16x8(args.add + from * args.add_stride + column, add);
#pragma unroll
            for (int j = 0; j < kVector; ++j) {
                v[i][j] = round_bf16(v[i][j] + add[j]);
            }
            store_bf16x8(v[i], x);
        }
#pragma unroll
        for (int j = 0; j < kVector; ++j) {
            squares = fmaf(v[i][j], v[i][j], squares);
        }
    }
    const float sum = block_reduce(squares, Sum{}, 0.0f, shared);
    const float scale = rsqrtf(sum / static_cast<float>(args.width) + args.eps);
#pragma unroll
    for (int i = 0; i < Vectors; ++i) {
        const int64_t column = (threadIdx.x + static_cast<int64_t>(i) * blockDim.x) * kVector;
        if (column >= args.width) {
            break;
        }
        float weight[kVector];
        load_bf16x8(args.weight + column, weight);
#pragma unroll
        for (int j = 0; j < kVector; ++j) {
            v[i][j] = round_bf16(round_bf16(v[i][j] * scale) * weight[j]);
        }
        store_outputs(args, row, column, v[i]);
    }
}

}  // namespace

void rms_norm_cuda(cudaStream_t stream, const RmsNormCudaArgs& args) {
    check(args.width % kVector == 0 && args.width <= 4 * kThreadsMax * kVector,
          "rms_norm: width must be a multiple of 8, at most 16384");
    check((args.x_stride | args.add_stride | args.y_stride | args.y8_stride) % kVector == 0,
          "rms_norm: strides must be multiples of 8");
    if (args.rows == 0) {
        return;
    }
    const int64_t vectors = args.width / kVector;
    const int threads = static_cast<int>(std::min<int64_t>((vectors + 31) / 32 * 32, kThreadsMax));
    const int64_t each = (vectors + threads - 1) / threads;
    const auto kernel =
        each == 1 ? rms_norm_kernel<1> : (each == 2 ? rms_norm_kernel<2> : rms_norm_kernel<4>);
    kernel<<<static_cast<unsigned>(args.rows), threads, 0, stream>>>(args);
    cuda_check_launch();
}

}  // namespace tessera

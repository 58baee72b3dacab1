#include <algorithm>

#include "base/check.h"
#include "device/cuda/cuda_check.h"
#include "ops/common/cuda/ask_ahead.cuh"
#include "ops/common/cuda/convert.cuh"
#include "ops/common/cuda/dependent_launch.cuh"
#include "ops/common/cuda/reduce.cuh"
#include "ops/rms_norm/cuda/rms_norm_cuda.h"

namespace tessera {
namespace cuda {
namespace {

constexpr int kVector = 8;  // bfloat16 in 16 bytes
constexpr int64_t kWidthMax = 16384;
constexpr int64_t kFewRows = 264;
constexpr int64_t kRowsAhead = 132;  // about as many as are under way
constexpr float kE4m3Max = 448;

__device__ __forceinline__ uint4 load_vector(const __nv_bfloat16* from) {
    return *reinterpret_cast<const uint4*>(from);
}
__device__ __forceinline__ void store_e4m3(const float (&y)[kVector], const Divider& divide, uint8_t* to) {
    float q[kVector];
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
        q[i] = divide(y[i]);
    }
    *reinterpret_cast<uint2*>(to) =
        make_uint2(pack_e4m3x4(q[0], q[1], q[2], q[3]), pack_e4m3x4(q[4], q[5], q[6], q[7]));
}

// The sum of the row's squares from those of its vectors, in an order that does not depend on the block's
// size: lane l adds vectors l, l + 32, ..., then the lanes are added. Every warp does it.
__device__ __forceinline__ float sum_row(const float* squares, int vectors) {
    float sum = 0;
#pragma unroll 16
    for (int v = static_cast<int>(threadIdx.x) % kWarp; v < vectors; v += kWarp) {
        sum += squares[v];
    }
    return warp_reduce(sum, Sum{});
}

__device__ __forceinline__ void ask_for_row(const RmsNormCudaArgs& args, int64_t row) {
    const auto bytes = static_cast<uint32_t>(args.width) * 2;
    ask_ahead(args.x + row * args.x_stride, bytes);
    if (args.add != nullptr) {
        ask_ahead(args.add + row * args.add_stride, bytes);
    }
}
// Each block asks for the row kRowsAhead further on, the first ones for theirs as well. By one thread.
__device__ __forceinline__ void ask_for_rows(const RmsNormCudaArgs& args) {
    const int64_t row = blockIdx.x;
    if (row < kRowsAhead) {
        ask_for_row(args, row);
    }
    if (row + kRowsAhead < args.rows) {
        ask_for_row(args, row + kRowsAhead);
    }
}

// Roofline: reads x (and add), writes y or y8 (and x): 3 to 8 bytes an element against about 10 operations,
// so bandwidth. A block holds one row in registers, Vectors pieces of 8 elements in each thread; all its
// loads are under way at once.
template <int Vectors>
__global__ void __launch_bounds__(512, 2) rms_norm_kernel(RmsNormCudaArgs args) {
    constexpr bool kStoreLate = Vectors > 1;  // with many rows reads come first
    extern __shared__ float squares[];        // [width / 8]
    __shared__ float maxima[kWarp];
    const int vectors = static_cast<int>(args.width) / kVector;
    const int step = static_cast<int>(blockDim.x);
    const int first = static_cast<int>(threadIdx.x);
    uint4 weight[Vectors];
    uint4 x[Vectors];
    uint4 add[Vectors];
#pragma unroll
    for (int i = 0; i < Vectors; ++i) {
        if (first + i * step < vectors) {
            weight[i] = load_vector(args.weight + (first + i * step) * kVector);
        }
    }
    if (args.x_rows == nullptr && threadIdx.x == 0) {
        ask_for_rows(args);
    }
    wait_for_previous_kernel();
    let_next_kernel_start();
    const int64_t row = blockIdx.x;
    const int64_t from = args.x_rows == nullptr ? row : args.x_rows[row];
    if (from < 0) {
        return;
    }
    __nv_bfloat16* x_row = args.x + from * args.x_stride;
#pragma unroll
    for (int i = 0; i < Vectors; ++i) {
        const int v = first + i * step;
        if (v < vectors) {
            x[i] = load_vector(x_row + v * kVector);
            if (args.add != nullptr) {
                add[i] = load_vector(args.add + from * args.add_stride + v * kVector);
            }
        }
    }
#pragma unroll
    for (int i = 0; i < Vectors; ++i) {
        const int v = first + i * step;
        if (v >= vectors) {
            break;
        }
        float value[kVector];
        unpack_bf16x8(x[i], value);
        if (args.add != nullptr) {
            float more[kVector];
            unpack_bf16x8(add[i], more);
#pragma unroll
            for (int j = 0; j < kVector; ++j) {
                value[j] = round_bf16(value[j] + more[j]);
            }
            x[i] = pack_bf16x8(value);
            if (!kStoreLate) {
                *reinterpret_cast<uint4*>(x_row + v * kVector) = x[i];
            }
        }
        float sum = 0;
#pragma unroll
        for (int j = 0; j < kVector; ++j) {
            sum = fmaf(value[j], value[j], sum);
        }
        squares[v] = sum;
    }
    __syncthreads();
    const float scale = rsqrtf(sum_row(squares, vectors) / static_cast<float>(args.width) + args.eps);
    float y8_scale = args.y8_scale;
    float largest = 0;
#pragma unroll
    for (int i = 0; i < Vectors; ++i) {
        const int v = first + i * step;
        if (v >= vectors) {
            break;
        }
        if (kStoreLate && args.add != nullptr) {
            *reinterpret_cast<uint4*>(x_row + v * kVector) = x[i];
        }
        float value[kVector];
        unpack_bf16x8(x[i], value);
#pragma unroll
        for (int j = 0; j < kVector; ++j) {
            value[j] *= scale;
        }
        x[i] = multiply_bf16x8(pack_bf16x8(value), weight[i]);
        if (args.y != nullptr) {
            *reinterpret_cast<uint4*>(args.y + row * args.y_stride + v * kVector) = x[i];
        }
        if (args.y8_row_scale != nullptr) {
            unpack_bf16x8(x[i], value);
#pragma unroll
            for (int j = 0; j < kVector; ++j) {
                largest = fmaxf(largest, fabsf(value[j]));
            }
        }
    }
    if (args.y8 == nullptr) {
        return;
    }
    if (args.y8_row_scale != nullptr) {
        largest = block_reduce(largest, Max{}, 0.0f, maxima);
        y8_scale = fmaxf(largest, 1e-20f) / kE4m3Max;
        if (threadIdx.x == 0) {
            args.y8_row_scale[row] = y8_scale;
        }
    }
    const Divider divide = divider(y8_scale);
#pragma unroll
    for (int i = 0; i < Vectors; ++i) {
        const int v = first + i * step;
        if (v < vectors) {
            float value[kVector];
            unpack_bf16x8(x[i], value);
            store_e4m3(value, divide, args.y8 + row * args.y8_stride + v * kVector);
        }
    }
}

}  // namespace
}  // namespace cuda

void rms_norm_cuda(cudaStream_t stream, const RmsNormCudaArgs& args) {
    using namespace cuda;
    check(args.width % kVector == 0 && args.width <= kWidthMax,
          "rms_norm: width must be a multiple of 8, at most 16384");
    check((args.x_stride | args.add_stride | args.y_stride | args.y8_stride) % kVector == 0,
          "rms_norm: strides must be multiples of 8");
    if (args.rows == 0) {
        return;
    }
    const int64_t vectors = args.width / kVector;
    // Few rows: as many threads as possible share the latency of one. Many: some 64 bytes under way in each.
    int64_t each = vectors > 512 ? 2 : 1;
    if (args.rows > kFewRows) {
        each = args.add != nullptr ? 2 : 4;
    }
    each = vectors > 1024 ? 4 : each;
    const auto threads = static_cast<int>(((vectors + each - 1) / each + kWarp - 1) / kWarp * kWarp);
    const auto kernel =
        each == 1 ? rms_norm_kernel<1> : (each == 2 ? rms_norm_kernel<2> : rms_norm_kernel<4>);
    cuda_check(launch_dependent(
        {dim3(static_cast<unsigned>(args.rows)), threads, static_cast<int>(vectors) * 4, stream}, kernel,
        args));
}

}  // namespace tessera

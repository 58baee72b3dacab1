#include "base/check.h"
#include "device/cuda/cuda_check.h"
#include "ops/common/cuda/ask_ahead.cuh"
#include "ops/common/cuda/convert.cuh"
#include "ops/common/cuda/dependent_launch.cuh"
#include "ops/common/cuda/exp.cuh"
#include "ops/swiglu/cuda/swiglu_cuda.h"

namespace tessera {
namespace {

using namespace cuda;

constexpr int kThreads = 128;
constexpr int kVector = 8;  // bfloat16 in 16 bytes

// Roofline: 6 bytes an element (5 with FP8 output) against some 60 operations; for few rows the latency of
// one element. A thread makes 8 elements of row blockIdx.x.
__global__ void __launch_bounds__(kThreads) swiglu_kernel(const SwigluCudaArgs args, const Divider divide) {
    const int64_t row = blockIdx.x;
    const int column = static_cast<int>(blockIdx.y * kThreads + threadIdx.x) * kVector;
    let_next_kernel_start();
    if (threadIdx.x == 0) {
        const auto bytes = static_cast<uint32_t>(min(args.width - column, int64_t{kThreads * kVector}) * 2);
        ask_ahead(args.gate + row * args.in_stride + column, bytes);
        ask_ahead(args.up + row * args.in_stride + column, bytes);
    }
    wait_for_previous_kernel();
    if (column >= args.width) {
        return;
    }
    float gate[kVector];
    float up[kVector];
    load_bf16x8(args.gate + row * args.in_stride + column, gate);
    load_bf16x8(args.up + row * args.in_stride + column, up);
    float y[kVector];
    silu_f32(gate, y);
#pragma unroll
    for (int i = 0; i < kVector; ++i) {
        y[i] = round_bf16(round_bf16(y[i]) * up[i]);
    }
    if (args.y != nullptr) {
        store_bf16x8(y, args.y + row * args.y_stride + column);
    }
    if (args.y8 != nullptr) {
#pragma unroll
        for (float& value : y) {
            value = divide.for_e4m3(value);
        }
        *reinterpret_cast<uint2*>(args.y8 + row * args.y8_stride + column) =
            make_uint2(pack_e4m3x4(y[0], y[1], y[2], y[3]), pack_e4m3x4(y[4], y[5], y[6], y[7]));
    }
}

}  // namespace

void swiglu_cuda(cudaStream_t stream, const SwigluCudaArgs& args) {
    check(args.width % kVector == 0 && (args.in_stride | args.y_stride | args.y8_stride) % kVector == 0,
          "swiglu: width and strides must be multiples of 8");
    if (args.rows == 0 || args.width == 0) {
        return;
    }
    const int64_t pieces = (args.width / kVector + kThreads - 1) / kThreads;
    cuda_check(
        launch_dependent({.grid = dim3(static_cast<unsigned>(args.rows), static_cast<unsigned>(pieces)),
                          .threads = kThreads,
                          .stream = stream},
                         swiglu_kernel, args, Divider{args.y8_scale, 1 / args.y8_scale}));
}

}  // namespace tessera

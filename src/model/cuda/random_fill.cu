#include <algorithm>

#include "base/check.h"
#include "device/cuda/cuda_check.h"
#include "model/cuda/random_fill.h"
#include "ops/common/cuda/convert.cuh"

namespace tessera {
namespace {

constexpr int kThreads = 256;
constexpr int64_t kBlocksMax = 4096;

// Mixes all bits of a counter (the finalizer of splitmix64).
__device__ __forceinline__ uint64_t mix(uint64_t x) {
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9ull;
    x = (x ^ (x >> 27)) * 0x94D049BB133111EBull;
    return x ^ (x >> 31);
}

__device__ __forceinline__ float draw(const RandomFillArgs& args, int64_t i) {
    const uint64_t bits = mix(args.seed + static_cast<uint64_t>(i) * 0x9E3779B97F4A7C15ull);
    const uint32_t sum = static_cast<uint32_t>(bits & 0xFFFF) + static_cast<uint32_t>((bits >> 16) & 0xFFFF) +
                         static_cast<uint32_t>((bits >> 32) & 0xFFFF) + static_cast<uint32_t>(bits >> 48);
    constexpr float kUnit = 1.7320508f / 65536.0f;  // four uniform numbers have variance 1/3
    return fmaf((static_cast<float>(sum) - 131070.0f) * kUnit, args.deviation, args.mean);
}

// Four elements a thread and turn. Floor: bytes over 4.27 TB/s; mixing makes it about three times that in
// e4m3.
template <DType kType>
__global__ void random_fill_kernel(RandomFillArgs args) {
    const int64_t step = static_cast<int64_t>(gridDim.x) * kThreads * 4;
    for (int64_t i = (static_cast<int64_t>(blockIdx.x) * kThreads + threadIdx.x) * 4; i < args.count;
         i += step) {
        const float value[4] = {draw(args, i), draw(args, i + 1), draw(args, i + 2), draw(args, i + 3)};
        const bool whole = i + 4 <= args.count;
        if constexpr (kType == DType::kFloat8E4M3) {
            auto* to = static_cast<uint8_t*>(args.to) + i;
            const uint32_t packed = cuda::pack_e4m3x4(value[0], value[1], value[2], value[3]);
            if (whole) {
                *reinterpret_cast<uint32_t*>(to) = packed;
            } else {
                for (int64_t j = 0; j < args.count - i; ++j) {
                    to[j] = static_cast<uint8_t>(packed >> (8 * j));
                }
            }
        } else if constexpr (kType == DType::kBFloat16) {
            auto* to = static_cast<__nv_bfloat16*>(args.to) + i;
            if (whole) {
                *reinterpret_cast<uint2*>(to) =
                    make_uint2(cuda::pack_bf16(value[0], value[1]), cuda::pack_bf16(value[2], value[3]));
            } else {
#pragma unroll
                for (int j = 0; j < 3; ++j) {
                    if (i + j < args.count) {
                        to[j] = __float2bfloat16_rn(value[j]);
                    }
                }
            }
        } else {
            auto* to = static_cast<float*>(args.to) + i;
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                if (i + j < args.count) {
                    to[j] = value[j];
                }
            }
        }
    }
}

}  // namespace

void random_fill_cuda(cudaStream_t stream, const RandomFillArgs& args) {
    if (args.count < 1) {
        return;
    }
    const int64_t wanted = (args.count + kThreads * 4 - 1) / (kThreads * 4);
    const auto blocks = static_cast<unsigned>(std::min(wanted, kBlocksMax));
    switch (args.dtype) {
        case DType::kFloat8E4M3:
            random_fill_kernel<DType::kFloat8E4M3><<<blocks, kThreads, 0, stream>>>(args);
            break;
        case DType::kBFloat16:
            random_fill_kernel<DType::kBFloat16><<<blocks, kThreads, 0, stream>>>(args);
            break;
        case DType::kFloat32:
            random_fill_kernel<DType::kFloat32><<<blocks, kThreads, 0, stream>>>(args);
            break;
        default:
            check(false, "random_fill: bfloat16, e4m3 or float32 only");
    }
    cuda_check_launch();
}

}  // namespace tessera

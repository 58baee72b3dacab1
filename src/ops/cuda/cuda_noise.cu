#include <cuda_bf16.h>
#include <cuda_fp8.h>

#include "device/cuda/cuda_check.h"
#include "ops/cuda/cuda_noise.h"

namespace tessera {
namespace {

// Roofline: 1 or 2 bytes written an element against about 12 integer operations: about half of each.
__global__ void fill_noise_kernel(void* to, int64_t count, NoiseSpec spec, int64_t first) {
    const float scale = spec.deviation * (1.0f / 148);
    const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x;
    for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < count; i += step) {
        const float value =
            __fmul_rn(static_cast<float>(noise_sum(spec.seed, static_cast<uint64_t>(first + i))), scale);
        if (spec.dtype == DType::kBFloat16) {
            static_cast<__nv_bfloat16*>(to)[i] = __float2bfloat16_rn(value);
        } else {
            static_cast<uint8_t*>(to)[i] = __nv_cvt_float_to_fp8(value, __NV_SATFINITE, __NV_E4M3);
        }
    }
}

__global__ void fill_bytes_kernel(uint8_t* to, int64_t count, uint64_t seed) {
    const int64_t step = static_cast<int64_t>(gridDim.x) * blockDim.x;
    for (int64_t i = static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x; i < count; i += step) {
        to[i] = noise_byte(seed, static_cast<uint64_t>(i));
    }
}

}  // namespace

void fill_noise_bytes_cuda(cudaStream_t stream, void* to, int64_t count, uint64_t seed) {
    if (count > 0) {
        fill_bytes_kernel<<<2048, 256, 0, stream>>>(static_cast<uint8_t*>(to), count, seed);
        cuda_check_launch();
    }
}

void fill_noise_cuda(cudaStream_t stream, void* to, int64_t count, const NoiseSpec& spec, int64_t first) {
    check(spec.dtype == DType::kBFloat16 || spec.dtype == DType::kFloat8E4M3, "noise: bfloat16 or e4m3");
    if (count > 0) {
        fill_noise_kernel<<<2048, 256, 0, stream>>>(to, count, spec, first);
        cuda_check_launch();
    }
}

}  // namespace tessera

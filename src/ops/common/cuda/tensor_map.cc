#include "ops/common/cuda/tensor_map.h"

#include <cuda_runtime_api.h>

#include "base/check.h"
#include "device/cuda/cuda_check.h"

namespace tessera::cuda {
namespace {

constexpr int64_t kBoxBytes = 128;

// The driver's function, found through the runtime, so that nothing links against the driver.
decltype(&cuTensorMapEncodeTiled) find_encoder() {
    void* function = nullptr;
    cudaDriverEntryPointQueryResult result = cudaDriverEntryPointSymbolNotFound;
    cuda_check(cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault,
                                                &result));
    check(result == cudaDriverEntryPointSuccess, "the driver has no cuTensorMapEncodeTiled");
    return reinterpret_cast<decltype(&cuTensorMapEncodeTiled)>(function);
}

}  // namespace

CUtensorMap make_tensor_map(const void* data, DType dtype, int64_t rows, int64_t columns, uint32_t box_rows) {
    check(dtype == DType::kBFloat16 || dtype == DType::kFloat8E4M3, "tensor map: bfloat16 or e4m3 only");
    const int64_t row_bytes = columns * dtype_size(dtype);
    check(reinterpret_cast<uintptr_t>(data) % 16 == 0 && row_bytes % 16 == 0,
          "tensor map: the data and every row must begin at a multiple of 16 bytes");
    const auto type =
        dtype == DType::kBFloat16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_UINT8;
    const cuuint64_t sizes[2] = {static_cast<cuuint64_t>(columns), static_cast<cuuint64_t>(rows)};
    const cuuint64_t strides[1] = {static_cast<cuuint64_t>(row_bytes)};
    const cuuint32_t box[2] = {static_cast<cuuint32_t>(kBoxBytes / dtype_size(dtype)), box_rows};
    const cuuint32_t steps[2] = {1, 1};
    CUtensorMap map;
    const CUresult result = find_encoder()(
        &map, type, 2, const_cast<void*>(data), sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
        CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    check(result == CUDA_SUCCESS, "tensor map: the driver refused the matrix");
    return map;
}

CUtensorMap make_page_map(const void* data, DType dtype, int64_t heads, int64_t page_stride) {
    check(dtype == DType::kBFloat16 || dtype == DType::kFloat8E4M3, "page map: bfloat16 or e4m3 only");
    check(reinterpret_cast<uintptr_t>(data) % 16 == 0 && page_stride % 16 == 0,
          "page map: the data and every page must begin at a multiple of 16 bytes");
    constexpr int64_t kSlots = 64;
    const int64_t row_bytes = 128 * dtype_size(dtype);
    const auto type =
        dtype == DType::kBFloat16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_UINT8;
    const auto box_columns = static_cast<cuuint32_t>(kBoxBytes / dtype_size(dtype));
    const auto halves = static_cast<cuuint32_t>(row_bytes / kBoxBytes);
    constexpr cuuint64_t kPagesMax = 0x7FFFFFFF;  // page tables say which exist
    const cuuint64_t sizes[5] = {box_columns, kSlots, halves, static_cast<cuuint64_t>(heads), kPagesMax};
    const cuuint64_t strides[4] = {static_cast<cuuint64_t>(row_bytes), kBoxBytes,
                                   static_cast<cuuint64_t>(kSlots * row_bytes),
                                   static_cast<cuuint64_t>(page_stride)};
    const cuuint32_t box[5] = {box_columns, kSlots, halves, 1, 1};
    const cuuint32_t steps[5] = {1, 1, 1, 1, 1};
    CUtensorMap map;
    const CUresult result = find_encoder()(
        &map, type, 5, const_cast<void*>(data), sizes, strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE,
        CU_TENSOR_MAP_SWIZZLE_128B, CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    check(result == CUDA_SUCCESS, "page map: the driver refused the pool");
    return map;
}

}  // namespace tessera::cuda

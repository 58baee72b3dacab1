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

CUtensorMap make_tensor_map(const void* data, const TensorBoxes& tensor) {
    check(tensor.dtype == DType::kBFloat16 || tensor.dtype == DType::kFloat8E4M3,
          "tensor map: bfloat16 or e4m3 only");
    const auto type =
        tensor.dtype == DType::kBFloat16 ? CU_TENSOR_MAP_DATA_TYPE_BFLOAT16 : CU_TENSOR_MAP_DATA_TYPE_UINT8;
    cuuint64_t sizes[5] = {};
    cuuint64_t strides[4] = {};
    cuuint32_t box[5] = {static_cast<cuuint32_t>(kBoxBytes / dtype_size(tensor.dtype))};
    const cuuint32_t steps[5] = {1, 1, 1, 1, 1};
    bool aligned = reinterpret_cast<uintptr_t>(data) % 16 == 0;
    for (int i = 0; i < tensor.rank; ++i) {
        sizes[i] = static_cast<cuuint64_t>(tensor.sizes[i]);
        if (i > 0) {
            strides[i - 1] = static_cast<cuuint64_t>(tensor.strides[i - 1]);
            box[i] = tensor.box[i - 1];
            aligned = aligned && tensor.strides[i - 1] % 16 == 0;
        }
    }
    check(aligned, "tensor map: the data and every row must begin at a multiple of 16 bytes");
    const auto promotion =
        tensor.promote ? CU_TENSOR_MAP_L2_PROMOTION_L2_256B : CU_TENSOR_MAP_L2_PROMOTION_NONE;
    CUtensorMap map;
    const CUresult result =
        find_encoder()(&map, type, static_cast<cuuint32_t>(tensor.rank), const_cast<void*>(data), sizes,
                       strides, box, steps, CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                       promotion, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    check(result == CUDA_SUCCESS, "tensor map: the driver refused the tensor");
    return map;
}

CUtensorMap make_tensor_map(const void* data, DType dtype, int64_t rows, int64_t columns, uint32_t box_rows) {
    return make_tensor_map(data, {.dtype = dtype,
                                  .rank = 2,
                                  .sizes = {columns, rows},
                                  .strides = {columns * dtype_size(dtype)},
                                  .box = {box_rows}});
}

CUtensorMap make_page_map(const void* data, DType dtype, int64_t heads, int64_t page_stride, bool promote) {
    constexpr int64_t kSlots = 64;
    constexpr int64_t kPagesMax = 0x7FFFFFFF;  // page tables say which exist
    const int64_t row_bytes = 128 * dtype_size(dtype);
    const int64_t halves = row_bytes / kBoxBytes;
    return make_tensor_map(data, {.dtype = dtype,
                                  .rank = 5,
                                  .sizes = {kBoxBytes / dtype_size(dtype), kSlots, halves, heads, kPagesMax},
                                  .strides = {row_bytes, kBoxBytes, kSlots * row_bytes, page_stride},
                                  .box = {kSlots, static_cast<uint32_t>(halves), 1, 1},
                                  .promote = promote});
}

}  // namespace tessera::cuda

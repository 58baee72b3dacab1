// Tensor maps: what the bulk copy engine must know of a matrix in device memory.
#pragma once

#include <cstdint>

#include <cuda.h>

#include "base/dtype.h"

namespace tessera::cuda {

// A row-major matrix [rows, columns] in global memory, read in boxes of box_rows by 128 bytes of columns that
// land in shared memory with the 128-byte swizzle. REQUIRES: data 16-byte aligned, rows a multiple of 16
// bytes.
CUtensorMap make_tensor_map(const void* data, DType dtype, int64_t rows, int64_t columns, uint32_t box_rows);

}  // namespace tessera::cuda

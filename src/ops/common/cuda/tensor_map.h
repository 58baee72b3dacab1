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

// A tensor of up to five dimensions, the innermost first, whose innermost elements lie side by side;
// strides[i] (bytes, a multiple of 16) is that of dimension i + 1. Boxes of 128 bytes of the innermost
// dimension by box[i] of dimension i + 1 land as rows of 128 bytes with the 128-byte swizzle; what lies
// outside of the sizes becomes zeros.
struct TensorBoxes {
    DType dtype = DType::kBFloat16;
    int rank = 2;
    int64_t sizes[5] = {};
    int64_t strides[4] = {};
    uint32_t box[4] = {1, 1, 1, 1};
    bool promote = true;  // a read of memory brings 256 bytes into the level-2 cache
};
CUtensorMap make_tensor_map(const void* data, const TensorBoxes& tensor);

// One layer's K or V in a pool of KV pages: page p holds [heads][64][128] of `dtype` at data + p *
// page_stride. A box is one head of one page: 64 rows of 256 bytes (bfloat16) as two blocks of [64][128
// bytes], the lower half of the columns first, or of 128 bytes (e4m3) as one; with the 128-byte swizzle. Its
// coordinates are {0, 0, 0, head, page}. promote: as in TensorBoxes. REQUIRES: data and page_stride multiples
// of 16 bytes.
CUtensorMap make_page_map(const void* data, DType dtype, int64_t heads, int64_t page_stride,
                          bool promote = true);

}  // namespace tessera::cuda

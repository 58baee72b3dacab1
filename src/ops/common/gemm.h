// The one matrix kernel of the CPU backend: rows of activations times one block (up to 64 outputs) of a
// packed weight. Every output is a single chain of fused multiply-adds over k = 0 .. inputs - 1, whatever the
// number of rows and the vector width: so a row's result is the same bits in any batch, chunking, thread
// count or machine.
#pragma once

#include <cstdint>

#include "ops/common/packed_matrix.h"

namespace tessera {

inline constexpr int64_t kGemmRowsMax = 96;

struct GemmBlockArgs {
    const float* const* rows = nullptr;  // [row_count] pointers to rows of weight->inputs floats
    int64_t row_count = 0;               // 1 .. kGemmRowsMax
    const PackedMatrix* weight = nullptr;
    int64_t block = 0;
    float* out = nullptr;  // [row_count][kBlockOutputs], 64-byte aligned; columns that are not asked for are
                           // left alone
    // The block, of the same size, that this thread computes next: it is fetched meanwhile. May be null.
    const std::byte* next = nullptr;
    // Memory of another kind: from here on as many bytes as the block has are fetched, where several tiles of
    // rows read the block. Only a hint: it may end before, or reach past, what is wanted. May be null.
    const std::byte* also = nullptr;
    // A part of the block: these of its columns, `first` a multiple of 32.
    int64_t first = 0;
    int64_t columns = kBlockOutputs;
};

// Rounds the rows to e4m3 where weight->input_scale or input_dynamic asks for it, and applies column_scale *
// input_scale at the end. With group_scale the chain starts anew with each group; sum = fma(scale of the
// group, the group's chain, sum). Uses some 100 KiB of stack then.
// REQUIRES: with an int4 weight inputs a multiple of 8.
void gemm_block(const GemmBlockArgs& args);
void gemm_block_ref(const GemmBlockArgs& args);

// gemm_block() of two blocks with a row each. The same bits; blocks of one size, whole and of plain weights,
// are read side by side, as two streams of memory are faster than one.
void gemm_block_pair(const GemmBlockArgs& a, const GemmBlockArgs& b);

// SwiGLU over what gemm_block left for a weight whose panels alternate gate and up: with g = out[r][32 p + i]
// and u = out[r][32 p + 16 + i], y[r][16 p + i] = silu(g) * u for p < pairs, i < 16.
struct SwigluBlockArgs {
    const float* out = nullptr;  // [rows][kBlockOutputs]
    int64_t rows = 0;
    int64_t pairs = 0;  // of panels: 1 or 2
    float* y = nullptr;
    int64_t y_stride = 0;
};
void swiglu_block(const SwigluBlockArgs& args);
void swiglu_block_ref(const SwigluBlockArgs& args);

}  // namespace tessera

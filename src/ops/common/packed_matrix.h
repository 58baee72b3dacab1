// PackedMatrix: a linear layer's weight in the layout that the CPU kernels stream. Outputs are grouped in
// panels of 16 and panels in blocks of 4 (the last block may have fewer); a block is stored k by k:
//   bfloat16: [inputs / 2][panels of the block][16] pairs of k and k + 1 in one 32-bit word (low half = k; an
//   odd
//             last k is paired with zero), so that one shift or mask widens 16 weights;
//   float32:  [inputs][panels of the block][16];
//   int4:     [inputs / 8][panels of the block][16] words of eight k's, k in the low four bits; two's
//             complement.
// bfloat16 stays as it is, float8 e4m3 becomes bfloat16 (exactly) with its scale per column, float16 and
// float32 become float32. So one block is one sequential stream of memory. Of int4, and of float8 that has
// scales of blocks, groups of kGroupInputs k's have a scale for each output.
#pragma once

#include <cstdint>
#include <span>

#include "base/dtype.h"

namespace tessera {

inline constexpr int64_t kPanelOutputs = 16;
inline constexpr int64_t kBlockPanels = 4;
inline constexpr int64_t kBlockOutputs = kPanelOutputs * kBlockPanels;
inline constexpr int64_t kGroupInputs = 128;

// Row-major [rows, inputs] in any weight dtype, aligned to the element only.
struct MatrixSource {
    const void* data = nullptr;
    DType dtype = DType::kBFloat16;
    int64_t rows = 0;
    int64_t inputs = 0;
    float scale = 1.0f;  // of an FP8 weight: w * scale
    // int4: data is [rows, inputs / 2], low nibble = even k, two's complement; w = code * the bfloat16 scale
    // of [rows, inputs / kGroupInputs].
    const uint16_t* group_scales = nullptr;
    // e4m3 with a scale for each block of kGroupInputs x kGroupInputs: [ceil(rows / kGroupInputs), groups].
    const float* block_scales = nullptr;
};

// A view; the model's arena owns the bytes. Column n of the packed matrix is output n of the layer; columns
// past the real outputs of a panel are zero.
struct PackedMatrix {
    std::byte* data = nullptr;       // 64-byte aligned
    DType dtype = DType::kBFloat16;  // kBFloat16, kFloat32 or kInt4
    int64_t outputs = 0;             // a multiple of 16
    int64_t inputs = 0;
    float* column_scale = nullptr;  // [outputs]; null = all 1
    float* group_scale = nullptr;   // [groups][outputs]: always with int4, perhaps with bfloat16; else null
    float input_scale = 0.0f;       // > 0: x is first rounded to e4m3(x / input_scale)
    bool input_dynamic = false;     // the same with a scale for each row, its largest magnitude / 448; only
                                    // beside group_scale

    int64_t panels() const { return outputs / kPanelOutputs; }
    int64_t blocks() const { return (panels() + kBlockPanels - 1) / kBlockPanels; }
    int64_t block_panels(int64_t block) const {
        const int64_t left = panels() - block * kBlockPanels;
        return left < kBlockPanels ? left : kBlockPanels;
    }
    // Bytes of one panel: the same for every panel.
    int64_t panel_words() const {  // along k
        return dtype == DType::kInt4 ? inputs / 8 : dtype == DType::kBFloat16 ? (inputs + 1) / 2 : inputs;
    }
    int64_t panel_bytes() const { return panel_words() * kPanelOutputs * 4; }
    int64_t groups() const { return (inputs + kGroupInputs - 1) / kGroupInputs; }  // of group_scale
    const std::byte* block_data(int64_t block) const { return data + block * kBlockPanels * panel_bytes(); }
    int64_t bytes() const { return panels() * panel_bytes(); }
};

// The dtype that a weight of dtype `source` is packed in.
DType packed_dtype(DType source);

// Fills one panel of `matrix` from rows [row, row + rows) of source, 1 <= rows <= 16; where column_scale is
// set, its 16 entries become source.scale; where group_scale is set, its entries come from the source's group
// or block scales. `scratch` holds at least pack_scratch_bytes(inputs). Panels may be filled by different
// threads at once.
struct PanelSource {
    const MatrixSource* source = nullptr;
    int64_t row = 0;
    int64_t rows = 0;
};
int64_t pack_scratch_bytes(int64_t inputs);
void pack_panel(const PackedMatrix& matrix, int64_t panel, const PanelSource& source, std::byte* scratch);

// Weight (output, k) of a packed matrix, without its scales: for references and tests.
float packed_weight(const PackedMatrix& matrix, int64_t output, int64_t k);

}  // namespace tessera

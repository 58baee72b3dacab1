#include "ops/common/packed_matrix.h"

#include <cstring>

#include "base/check.h"
#include "ops/common/half.h"

namespace tessera {
namespace {

template <typename T>
T load(const void* data, int64_t index) {
    T value;
    std::memcpy(&value, static_cast<const std::byte*>(data) + index * static_cast<int64_t>(sizeof(T)),
                sizeof(T));
    return value;
}

// One source row as the words of the packed layout: pairs of bfloat16, or float32.
void row_words(const MatrixSource& source, int64_t row, uint32_t* words) {
    const int64_t first = row * source.inputs;
    const int64_t inputs = source.inputs;
    auto* halves = reinterpret_cast<uint16_t*>(words);
    switch (source.dtype) {
        case DType::kBFloat16:
            std::memcpy(halves, static_cast<const std::byte*>(source.data) + first * 2,
                        static_cast<size_t>(inputs) * 2);
            break;
        case DType::kFloat8E4M3:
            for (int64_t k = 0; k < inputs; ++k) {
                halves[k] = f32_to_bf16(e4m3_to_f32(load<uint8_t>(source.data, first + k)));
            }
            break;
        case DType::kFloat16:
            for (int64_t k = 0; k < inputs; ++k) {
                words[k] = std::bit_cast<uint32_t>(f16_to_f32(load<uint16_t>(source.data, first + k)));
            }
            break;
        case DType::kFloat32:
            std::memcpy(words, static_cast<const std::byte*>(source.data) + first * 4,
                        static_cast<size_t>(inputs) * 4);
            break;
        case DType::kInt4:
            std::memcpy(words, static_cast<const std::byte*>(source.data) + first / 2,
                        static_cast<size_t>(inputs) / 2);
            break;
        case DType::kInt32:
        case DType::kInt64:
        case DType::kUInt8:
            check(false, "pack_panel: not a weight dtype");
    }
}

float group_scale(const MatrixSource& source, int64_t row, int64_t group) {
    const int64_t groups = (source.inputs + kGroupInputs - 1) / kGroupInputs;
    return source.block_scales != nullptr ? source.block_scales[row / kGroupInputs * groups + group]
                                          : bf16_to_f32(source.group_scales[row * groups + group]);
}

}  // namespace

DType packed_dtype(DType source) {
    if (source == DType::kInt4) {
        return DType::kInt4;
    }
    return source == DType::kBFloat16 || source == DType::kFloat8E4M3 ? DType::kBFloat16 : DType::kFloat32;
}

int64_t pack_scratch_bytes(int64_t inputs) {
    return (inputs + 1) * 4 * kPanelOutputs;
}

void pack_panel(const PackedMatrix& matrix, int64_t panel, const PanelSource& source, std::byte* scratch) {
    check(source.rows >= 1 && source.rows <= kPanelOutputs && source.source->inputs == matrix.inputs &&
              source.row + source.rows <= source.source->rows,
          "pack_panel: the panel does not fit its source");
    check(packed_dtype(source.source->dtype) == matrix.dtype,
          "pack_panel: sources of one matrix differ in dtype");
    const int64_t words = matrix.panel_words();
    auto* rows = reinterpret_cast<uint32_t*>(scratch);  // [16][words]
    for (int64_t r = 0; r < kPanelOutputs; ++r) {
        uint32_t* row = rows + r * words;
        if (r >= source.rows) {
            std::memset(row, 0, static_cast<size_t>(words) * 4);
            continue;
        }
        row[words - 1] = 0;  // an odd last k keeps its zero partner
        row_words(*source.source, source.row + r, row);
    }
    const int64_t block = panel / kBlockPanels;
    const int64_t step = matrix.block_panels(block) * kPanelOutputs;
    auto* out = reinterpret_cast<uint32_t*>(matrix.data + block * kBlockPanels * matrix.panel_bytes()) +
                panel % kBlockPanels * kPanelOutputs;
    for (int64_t w = 0; w < words; ++w) {
        for (int64_t r = 0; r < kPanelOutputs; ++r) {
            out[w * step + r] = rows[r * words + w];
        }
    }
    for (int64_t g = 0; matrix.group_scale != nullptr && g < matrix.groups(); ++g) {
        for (int64_t r = 0; r < kPanelOutputs; ++r) {
            matrix.group_scale[g * matrix.outputs + panel * kPanelOutputs + r] =
                r < source.rows ? group_scale(*source.source, source.row + r, g) : 0.0f;
        }
    }
    if (matrix.column_scale != nullptr) {
        for (int64_t r = 0; r < kPanelOutputs; ++r) {
            matrix.column_scale[panel * kPanelOutputs + r] = source.source->scale;
        }
    }
}

float packed_weight(const PackedMatrix& matrix, int64_t output, int64_t k) {
    const int64_t panel = output / kPanelOutputs;
    const int64_t block = panel / kBlockPanels;
    const int64_t step = matrix.block_panels(block) * kPanelOutputs;
    const int64_t column = panel % kBlockPanels * kPanelOutputs + output % kPanelOutputs;
    const auto* words = reinterpret_cast<const uint32_t*>(matrix.block_data(block)) + column;
    if (matrix.dtype == DType::kFloat32) {
        return std::bit_cast<float>(words[k * step]);
    }
    if (matrix.dtype == DType::kInt4) {
        return static_cast<float>(static_cast<int32_t>(words[k / 8 * step] << (28 - k % 8 * 4)) >> 28);
    }
    const uint32_t pair = words[k / 2 * step];
    return bf16_to_f32(static_cast<uint16_t>(k % 2 == 0 ? pair & 0xFFFFu : pair >> 16));
}

}  // namespace tessera

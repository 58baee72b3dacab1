// Packed matrices with random weights, for the cases of tests and benchmarks.
#pragma once

#include <algorithm>
#include <vector>

#include "device/host_buffer.h"
#include "ops/common/half.h"
#include "ops/common/packed_matrix.h"
#include "ops/op_case.h"

namespace tessera {

struct RandomMatrixSpec {
    int64_t outputs = 0;
    int64_t inputs = 0;
    DType dtype = DType::kBFloat16;  // of the checkpoint
    bool alternate = false;          // the first and second half of the outputs in alternating panels
    float scale = 1.0f;              // FP8 only
    float input_scale = 0.0f;        // FP8 only; > 0: activations are rounded too
    bool input_dynamic = false;      // int4 and blocks only: the same with a scale for each row
    bool blocks = false;             // FP8 only: a scale, about `scale`, for each block of 128 x 128
};

// Owns both the checkpoint's matrix (row-major, [outputs, inputs]) and its packed form.
class RandomMatrix {
  public:
    RandomMatrix(const RandomMatrixSpec& spec, OpRandom& random) : spec_(spec) {
        values_.resize(static_cast<size_t>(spec.outputs * spec.inputs));
        const bool int4 = spec.dtype == DType::kInt4;
        raw_.resize(int4 ? values_.size() / 2 : values_.size() * static_cast<size_t>(dtype_size(spec.dtype)));
        if (int4) {
            group_scales_.resize(static_cast<size_t>(spec.outputs * blocks(spec.inputs)));
            for (uint16_t& scale : group_scales_) {
                scale = f32_to_bf16(spec.scale * (1 + 0.5f * random.uniform()));
            }
        }
        if (spec.blocks) {
            block_scales_.resize(static_cast<size_t>(parts() * blocks(part_rows()) * blocks(spec.inputs)));
            for (float& scale : block_scales_) {
                scale = spec.scale * (1 + 0.5f * random.uniform());
            }
        }
        for (size_t i = 0; i < values_.size(); ++i) {
            store(i, random);
        }
        pack();
    }
    RandomMatrix(const RandomMatrix&) = delete;
    RandomMatrix& operator=(const RandomMatrix&) = delete;

    const PackedMatrix& packed() const { return packed_; }
    // Weight as the checkpoint means it, without the FP8 scale.
    float value(int64_t output, int64_t k) const {
        return values_[static_cast<size_t>(output * spec_.inputs + k)];
    }
    // With spec.blocks: what value() is multiplied with.
    float block_scale(int64_t output, int64_t k) const {
        const int64_t part = output / part_rows();
        const int64_t down = part * blocks(part_rows()) + output % part_rows() / kGroupInputs;
        return block_scales_[static_cast<size_t>(down * blocks(spec_.inputs) + k / kGroupInputs)];
    }

  private:
    int64_t parts() const { return spec_.alternate ? 2 : 1; }
    int64_t part_rows() const { return spec_.outputs / parts(); }
    static int64_t blocks(int64_t extent) { return (extent + kGroupInputs - 1) / kGroupInputs; }

    void store(size_t i, OpRandom& random) {
        const float wanted = random.uniform();
        auto* raw = raw_.data();
        switch (spec_.dtype) {
            case DType::kFloat8E4M3: {
                const auto bits = static_cast<uint8_t>(random.below(0x7F) | (random.below(2) << 7));
                reinterpret_cast<uint8_t*>(raw)[i] = bits;
                values_[i] = e4m3_to_f32(bits);
                return;
            }
            case DType::kFloat16: {  // any finite bits of magnitude below 2
                const auto bits = static_cast<uint16_t>(random.below(0x4000) | (random.below(2) << 15));
                reinterpret_cast<uint16_t*>(raw)[i] = bits;
                values_[i] = f16_to_f32(bits);
                return;
            }
            case DType::kInt4: {  // every code, -8 too
                const auto code = static_cast<int>(random.below(16));
                auto& byte = reinterpret_cast<uint8_t*>(raw)[i / 2];
                byte = static_cast<uint8_t>(i % 2 == 0 ? code : byte | code << 4);
                values_[i] = static_cast<float>(code < 8 ? code : code - 16);
                return;
            }
            case DType::kFloat32:
                reinterpret_cast<float*>(raw)[i] = wanted;
                values_[i] = wanted;
                return;
            default:
                reinterpret_cast<uint16_t*>(raw)[i] = f32_to_bf16(wanted);
                values_[i] = bf16_to_f32(f32_to_bf16(wanted));
        }
    }

    void pack() {
        const int64_t rows = part_rows();
        packed_.dtype = packed_dtype(spec_.dtype);
        packed_.outputs = (rows + kPanelOutputs - 1) / kPanelOutputs * kPanelOutputs * parts();
        packed_.inputs = spec_.inputs;
        packed_.input_scale = spec_.input_scale;
        packed_.input_dynamic = spec_.input_dynamic;
        memory_ = HostBuffer(packed_.bytes());
        packed_.data = memory_.data();
        if (spec_.dtype == DType::kInt4 || spec_.blocks) {
            scales_.resize(static_cast<size_t>(packed_.outputs * packed_.groups()));
            packed_.group_scale = scales_.data();
        } else if (spec_.dtype == DType::kFloat8E4M3) {
            scales_.resize(static_cast<size_t>(packed_.outputs));
            packed_.column_scale = scales_.data();
        }
        std::vector<std::byte> scratch(static_cast<size_t>(pack_scratch_bytes(spec_.inputs)));
        for (int64_t p = 0; p < packed_.panels(); ++p) {
            const MatrixSource source = part(p % parts());
            const int64_t row = p / parts() * kPanelOutputs;
            pack_panel(packed_, p, {&source, row, std::min(kPanelOutputs, rows - row)}, scratch.data());
        }
    }

    MatrixSource part(int64_t index) const {
        const bool int4 = spec_.dtype == DType::kInt4;
        const int64_t rows = part_rows();
        const int64_t row_bytes = int4 ? spec_.inputs / 2 : spec_.inputs * dtype_size(spec_.dtype);
        const int64_t groups = packed_.groups();
        return {
            .data = raw_.data() + index * rows * row_bytes,
            .dtype = spec_.dtype,
            .rows = rows,
            .inputs = spec_.inputs,
            .scale = spec_.scale,
            .group_scales = int4 ? group_scales_.data() + index * rows * groups : nullptr,
            .block_scales = spec_.blocks ? block_scales_.data() + index * blocks(rows) * groups : nullptr};
    }

    RandomMatrixSpec spec_;
    std::vector<float> values_;
    std::vector<std::byte> raw_;
    std::vector<uint16_t> group_scales_;
    std::vector<float> block_scales_;
    std::vector<float> scales_;  // packed_'s
    HostBuffer memory_;
    PackedMatrix packed_;
};

}  // namespace tessera

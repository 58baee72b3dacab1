#include "model/device_form/int4_experts.h"

#include <algorithm>

#include "ops/common/half.h"
#include "ops/moe/w4_layout.h"
#include "weights/int4_weights.h"

namespace tessera {
namespace {

constexpr int64_t kWidthMax = 2048;  // of moe_cuda_bind()
constexpr int64_t kHiddenMax = 8192;

// Some rows in the one form that w4_pack_unit() takes.
struct Rows {
    void read(const LinearWeights& linear, int64_t first, int64_t rows) {
        codes.resize(static_cast<size_t>(rows * linear.weight.cols / 2));
        scales.resize(static_cast<size_t>(rows * linear.weight.cols / kInt4Group));
        int4_rows({&linear, first, rows, codes.data(), scales.data()});
    }
    W4Source source() const { return {codes.data(), scales.data()}; }

    std::vector<uint8_t> codes;
    std::vector<uint16_t> scales;
};

}  // namespace

bool int4_experts_fit(const std::vector<MlpWeights>& experts) {
    return !experts.empty() && std::ranges::all_of(experts, [](const MlpWeights& expert) {
        const int64_t width = expert.gate.weight.rows;
        return expert.gate.int4 && expert.up.int4 && expert.down.int4 && width % 64 == 0 &&
               width <= kWidthMax && expert.gate.weight.cols <= kHiddenMax;
    });
}

void pack_int4_expert(const MlpWeights& expert, ThreadPool& pool, PackedInt4Expert& out) {
    const int64_t hidden = expert.gate.weight.cols;
    const int64_t width = expert.gate.weight.rows;
    out.gate_up.resize(static_cast<size_t>(w4_gate_up_bytes(hidden, width)));
    out.down.resize(static_cast<size_t>(w4_down_bytes(hidden, width)));
    std::vector<Rows> firsts(static_cast<size_t>(pool.size()));
    std::vector<Rows> seconds(firsts.size());
    const int64_t gate_units = width / 32;
    pool.parallel_for(gate_units + hidden / kGroupedUnitRows, [&](int64_t unit, int thread) {
        Rows& first = firsts[static_cast<size_t>(thread)];
        Rows& second = seconds[static_cast<size_t>(thread)];
        if (unit < gate_units) {
            first.read(expert.gate, unit * 32, 32);
            second.read(expert.up, unit * 32, 32);
            w4_pack_unit({.weight = first.source(),
                          .up = second.source(),
                          .inputs = hidden,
                          .to = out.gate_up.data() + unit * w4_unit_bytes(hidden)});
        } else {
            unit -= gate_units;
            first.read(expert.down, unit * kGroupedUnitRows, kGroupedUnitRows);
            w4_pack_unit({.weight = first.source(),
                          .inputs = width,
                          .to = out.down.data() + unit * w4_unit_bytes(width)});
        }
    });
}

void int4_to_bf16(const LinearWeights& linear, std::vector<uint16_t>& out) {
    constexpr int64_t kRowsAtOnce = 64;
    const WeightView& weight = linear.weight;
    out.resize(static_cast<size_t>(weight.rows * weight.cols));
    Rows rows;
    for (int64_t first = 0; first < weight.rows; first += kRowsAtOnce) {
        const int64_t count = std::min(kRowsAtOnce, weight.rows - first);
        rows.read(linear, first, count);
        for (int64_t i = 0; i < count * weight.cols; ++i) {
            const int nibble = rows.codes[static_cast<size_t>(i / 2)] >> i % 2 * 4 & 15;
            const float scale = bf16_to_f32(rows.scales[static_cast<size_t>(i / kInt4Group)]);
            const int code = nibble < 8 ? nibble : nibble - 16;
            out[static_cast<size_t>(first * weight.cols + i)] = f32_to_bf16(static_cast<float>(code) * scale);
        }
    }
}

}  // namespace tessera

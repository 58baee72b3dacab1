#include "model/device_form/grouped_experts.h"

#include <algorithm>

#include "ops/common/half.h"
#include "ops/moe/w4_layout.h"
#include "ops/moe/w8_layout.h"
#include "weights/int4_weights.h"

namespace tessera {
namespace {

static_assert(kFp8Block == kGroupedInputs && kInt4Group == kGroupedInputs);

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

// fits: of a linear.
template <typename Fits>
bool experts_fit(const std::vector<MlpWeights>& experts, const Fits& fits) {
    return !experts.empty() && std::ranges::all_of(experts, [&](const MlpWeights& expert) {
        return fits(expert.gate) && fits(expert.up) && fits(expert.down) &&
               grouped_sizes_fit(expert.gate.weight.cols, expert.gate.weight.rows);
    });
}

// pack(weight, up, first, to, thread): a unit from row `first` of gate and up, or of down with up null.
template <typename UnitBytes, typename Pack>
void pack_units(const MlpWeights& expert, ThreadPool& pool, PackedExpert& out, const UnitBytes& unit_bytes,
                const Pack& pack) {
    const int64_t hidden = expert.gate.weight.cols;
    const int64_t width = expert.gate.weight.rows;
    const int64_t gate_units = width / 32;
    const int64_t down_units = hidden / kGroupedUnitRows;
    out.gate_up.resize(static_cast<size_t>(gate_units * unit_bytes(hidden)));
    out.down.resize(static_cast<size_t>(down_units * unit_bytes(width)));
    pool.parallel_for(gate_units + down_units, [&](int64_t unit, int thread) {
        if (unit < gate_units) {
            pack(expert.gate, &expert.up, unit * 32, out.gate_up.data() + unit * unit_bytes(hidden), thread);
        } else {
            unit -= gate_units;
            pack(expert.down, nullptr, unit * kGroupedUnitRows, out.down.data() + unit * unit_bytes(width),
                 thread);
        }
    });
}

}  // namespace

bool int4_experts_fit(const std::vector<MlpWeights>& experts) {
    return experts_fit(experts, [](const LinearWeights& linear) { return linear.int4.has_value(); });
}

bool block_experts_fit(const std::vector<MlpWeights>& experts) {
    return experts_fit(experts, [](const LinearWeights& linear) { return linear.blocks.has_value(); });
}

void pack_int4_expert(const MlpWeights& expert, ThreadPool& pool, PackedExpert& out) {
    std::vector<Rows> firsts(static_cast<size_t>(pool.size()));
    std::vector<Rows> seconds(firsts.size());
    pack_units(
        expert, pool, out, w4_unit_bytes,
        [&](const LinearWeights& weight, const LinearWeights* up, int64_t row, uint8_t* to, int thread) {
            Rows& first = firsts[static_cast<size_t>(thread)];
            Rows& second = seconds[static_cast<size_t>(thread)];
            const int64_t rows = up != nullptr ? kGroupedUnitRows / 2 : kGroupedUnitRows;
            first.read(weight, row, rows);
            if (up != nullptr) {
                second.read(*up, row, rows);
            }
            w4_pack_unit({.weight = first.source(),
                          .up = up != nullptr ? second.source() : W4Source{},
                          .inputs = weight.weight.cols,
                          .to = to});
        });
}

void pack_block_expert(const MlpWeights& expert, ThreadPool& pool, PackedExpert& out) {
    const auto source = [](const LinearWeights& linear) {
        return W8Source{static_cast<const uint8_t*>(linear.weight.data), linear.blocks->scales};
    };
    pack_units(expert, pool, out, w8_unit_bytes,
               [&](const LinearWeights& weight, const LinearWeights* up, int64_t row, uint8_t* to, int) {
                   w8_pack_unit({.weight = source(weight),
                                 .up = up != nullptr ? source(*up) : W8Source{},
                                 .first = row,
                                 .inputs = weight.weight.cols,
                                 .to = to});
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

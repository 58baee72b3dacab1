#include "ops/moe/w8_layout.h"

#include <cstring>
#include <gtest/gtest.h>
#include <vector>

#include "ops/op_case.h"

namespace tessera {
namespace {

// As the A side of wgmma has a thread's four registers of a step (w4_mma.cuh).
TEST(W8Layout, a_lane_has_the_registers_of_a_step_side_by_side) {
    for (int64_t thread = 0; thread < 128; ++thread) {
        for (int64_t i = 0; i < 64; ++i) {  // bytes of a group
            const int64_t step = i / 16;
            const int64_t word = i % 16 / 4;
            const int64_t row = thread / 32 * 16 + thread % 32 / 4 + word % 2 * 8;
            const int64_t input = step * 32 + word / 2 * 16 + thread % 4 * 4 + i % 4;
            ASSERT_EQ(w8_place(row, input).byte, kW8ScaleBytes + step * 2048 + thread * 16 + i % 16);
        }
    }
}

struct Blocks {
    Blocks(int64_t rows_count, int64_t inputs_count, OpRandom& random)
        : inputs(inputs_count), groups((inputs + 127) / 128) {
        for (int64_t i = 0; i < rows_count * inputs; ++i) {
            weights.push_back(static_cast<uint8_t>(random.below(256)));
        }
        for (int64_t i = 0; i < (rows_count + 127) / 128 * groups; ++i) {
            scales.push_back(random.uniform());
        }
    }
    W8Source source() const { return {weights.data(), scales.data()}; }

    int64_t inputs, groups;
    std::vector<uint8_t> weights;
    std::vector<float> scales;
};

void expect_row(const std::vector<uint8_t>& unit, int64_t unit_row, const Blocks& from, int64_t row) {
    for (int64_t k = 0; k < from.inputs; ++k) {
        const W8Place place = w8_place(unit_row, k);
        ASSERT_EQ(unit[static_cast<size_t>(place.byte)],
                  from.weights[static_cast<size_t>(row * from.inputs + k)])
            << unit_row << ' ' << k;
        float scale = 0;
        std::memcpy(&scale, unit.data() + place.scale, sizeof(scale));
        ASSERT_EQ(scale, from.scales[static_cast<size_t>(row / 128 * from.groups + k / 128)])
            << unit_row << ' ' << k;
    }
    for (int64_t k = from.inputs; k < from.groups * 128; ++k) {
        ASSERT_EQ(unit[static_cast<size_t>(w8_place(unit_row, k).byte)], 0) << "past the last input";
    }
}

TEST(W8Layout, a_unit_holds_its_rows_with_zeros_in_a_short_last_group) {
    OpRandom random(5);
    for (const int64_t inputs : {64, 128, 192, 256}) {
        const Blocks gate(320, inputs, random);
        const Blocks up(320, inputs, random);
        std::vector<uint8_t> unit(static_cast<size_t>(w8_unit_bytes(inputs)), 0xFF);
        for (const int64_t first : {0, 64, 256}) {
            w8_pack_unit({.weight = gate.source(), .first = first, .inputs = inputs, .to = unit.data()});
            for (int64_t row = 0; row < 64; ++row) {
                expect_row(unit, row, gate, first + row);
            }
        }
        for (const int64_t first : {0, 96, 288}) {
            w8_pack_unit({.weight = gate.source(),
                          .up = up.source(),
                          .first = first,
                          .inputs = inputs,
                          .to = unit.data()});
            for (int64_t row = 0; row < 32; ++row) {
                expect_row(unit, grouped_gate_row(row), gate, first + row);
                expect_row(unit, grouped_gate_row(row) + 8, up, first + row);
            }
        }
    }
}

}  // namespace
}  // namespace tessera

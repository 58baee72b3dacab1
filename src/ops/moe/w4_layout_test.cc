#include "ops/moe/w4_layout.h"

#include <gtest/gtest.h>
#include <vector>

#include "ops/common/half.h"
#include "ops/op_case.h"

namespace tessera {
namespace {

// What the kernel does to eight stored codes, in its words.
uint32_t expanded(uint32_t word) {
    return (word & 0x01010101u) * 130u + (word & 0x0E0E0E0Eu);
}

TEST(W4Layout, every_code_becomes_its_e4m3) {
    for (int code = -8; code < 8; ++code) {
        EXPECT_EQ(w4_code(w4_stored(code)), code);
        const uint32_t byte = expanded(w4_stored(code) * 0x01010101u) & 0xFF;
        EXPECT_EQ(e4m3_to_f32(static_cast<uint8_t>(byte)), static_cast<float>(code) / 256) << code;
        EXPECT_EQ(expanded(w4_stored(code) * 0x01010101u), byte * 0x01010101u);
    }
}

struct Codes {
    Codes(int64_t rows, int64_t inputs_count, OpRandom& random) : inputs(inputs_count) {
        codes.resize(static_cast<size_t>(rows * inputs / 2));
        scales.resize(static_cast<size_t>(rows * ((inputs + 127) / 128)));
        for (uint8_t& byte : codes) {
            byte = static_cast<uint8_t>(random.below(256));
        }
        for (uint16_t& scale : scales) {
            scale = static_cast<uint16_t>(random.below(65536));
        }
    }
    int code(int64_t row, int64_t k) const {
        const int nibble = codes[static_cast<size_t>(row * inputs + k) / 2] >> k % 2 * 4 & 15;
        return nibble < 8 ? nibble : nibble - 16;
    }
    uint16_t scale(int64_t row, int64_t k) const {
        return scales[static_cast<size_t>(row * ((inputs + 127) / 128) + k / 128)];
    }
    int64_t inputs;
    std::vector<uint8_t> codes;
    std::vector<uint16_t> scales;
};

void expect_row(const std::vector<uint8_t>& unit, int64_t unit_row, const Codes& from, int64_t row) {
    for (int64_t k = 0; k < from.inputs; ++k) {
        const W4Place place = w4_place(unit_row, k);
        const int stored = unit[static_cast<size_t>(place.byte)] >> place.shift & 15;
        ASSERT_EQ(w4_code(stored), from.code(row, k)) << unit_row << ' ' << k;
        const uint16_t scale = static_cast<uint16_t>(unit[static_cast<size_t>(place.scale)] |
                                                     unit[static_cast<size_t>(place.scale) + 1] << 8);
        ASSERT_EQ(scale, from.scale(row, k)) << unit_row << ' ' << k;
    }
}

TEST(W4Layout, a_unit_holds_its_rows_with_a_short_last_group) {
    OpRandom random(5);
    for (const int64_t inputs : {64, 128, 192, 256}) {
        const Codes gate(96, inputs, random);
        const Codes up(96, inputs, random);
        std::vector<uint8_t> unit(static_cast<size_t>(w4_unit_bytes(inputs)));
        const W4Source source{gate.codes.data(), gate.scales.data()};
        w4_pack_unit({.weight = source, .first = 32, .inputs = inputs, .to = unit.data()});
        for (int64_t row = 0; row < 64; ++row) {
            expect_row(unit, row, gate, 32 + row);
        }
        w4_pack_unit({.weight = source,
                      .up = {up.codes.data(), up.scales.data()},
                      .first = 64,
                      .inputs = inputs,
                      .to = unit.data()});
        for (int64_t row = 0; row < 32; ++row) {
            expect_row(unit, grouped_gate_row(row), gate, 64 + row);
            expect_row(unit, grouped_gate_row(row) + 8, up, 64 + row);
        }
    }
}

}  // namespace
}  // namespace tessera

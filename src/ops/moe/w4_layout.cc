#include "ops/moe/w4_layout.h"

#include <array>
#include <cstring>

#include "base/check.h"

namespace tessera {
namespace {

// Two codes of a byte to the two stored ones.
constexpr std::array<uint8_t, 256> stored_pairs() {
    std::array<uint8_t, 256> table{};
    const auto code = [](int nibble) { return nibble < 8 ? nibble : nibble - 16; };
    for (int i = 0; i < 256; ++i) {
        table[static_cast<size_t>(i)] =
            static_cast<uint8_t>(w4_stored(code(i & 15)) | w4_stored(code(i >> 4)) << 4);
    }
    return table;
}
constexpr std::array<uint8_t, 256> kStored = stored_pairs();

struct Row {
    const uint8_t* codes = nullptr;
    const uint16_t* scales = nullptr;
};

// Row r of the unit's 64.
Row unit_row(const W4Unit& unit, int64_t r) {
    const W4Source* source = &unit.weight;
    int64_t row = unit.first + r;
    if (unit.up.codes != nullptr) {
        source = r % 16 < 8 ? &unit.weight : &unit.up;
        row = unit.first + r / 16 * 8 + r % 8;
    }
    const int64_t groups = (unit.inputs + kGroupedInputs - 1) / kGroupedInputs;
    return {source->codes + row * unit.inputs / 2, source->scales + row * groups};
}

// 64 inputs of rows low and high, as the words of four lanes.
void pack_pair(const Row& low, const Row& high, int64_t input, uint8_t* to) {
    for (int64_t i = 0; i < 64; i += 2) {
        const uint8_t a = kStored[low.codes[(input + i) / 2]];
        const uint8_t b = kStored[high.codes[(input + i) / 2]];
        uint8_t* word = to + i % 16 / 4 * 16 + i / 16 * 4;
        word[i % 4] = static_cast<uint8_t>((a & 15) | (b & 15) << 4);
        word[i % 4 + 1] = static_cast<uint8_t>(a >> 4 | (b & 0xF0));
    }
}

}  // namespace

void w4_pack_unit(const W4Unit& unit) {
    check(unit.inputs % 64 == 0, "w4_pack_unit: inputs must be a multiple of 64");
    for (int64_t warp = 0; warp < 4; ++warp) {
        for (int64_t r = 0; r < 8; ++r) {
            const Row low = unit_row(unit, warp * 16 + r);
            const Row high = unit_row(unit, warp * 16 + r + 8);
            for (int64_t input = 0; input < unit.inputs; input += 64) {
                const int64_t group = input / kGroupedInputs;
                uint8_t* to = unit.to + group * kW4GroupBytes;
                std::memcpy(to + (warp * 8 + r) * 4, low.scales + group, 2);
                std::memcpy(to + (warp * 8 + r) * 4 + 2, high.scales + group, 2);
                pack_pair(low, high, input,
                          to + kW4ScaleBytes + input % kGroupedInputs * 32 + warp * 512 + r * 64);
            }
        }
    }
}

}  // namespace tessera

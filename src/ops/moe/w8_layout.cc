#include "ops/moe/w8_layout.h"

#include <cstring>

#include "base/check.h"

namespace tessera {

void w8_pack_unit(const W8Unit& unit) {
    const bool gate_up = unit.up.weights != nullptr;
    check(unit.first % (gate_up ? kGroupedUnitRows / 2 : kGroupedUnitRows) == 0,
          "w8_pack_unit: a unit begins at a multiple of its rows");
    const int64_t groups = (unit.inputs + kGroupedInputs - 1) / kGroupedInputs;
    std::memset(unit.to, 0, static_cast<size_t>(w8_unit_bytes(unit.inputs)));
    for (int64_t r = 0; r < kGroupedUnitRows; ++r) {
        const W8Source& source = gate_up && r % 16 >= 8 ? unit.up : unit.weight;
        const int64_t row = unit.first + (gate_up ? r / 16 * 8 + r % 8 : r);
        for (int64_t group = 0; group < groups; ++group) {
            const float* scale = source.scales + row / kGroupedInputs * groups + group;
            std::memcpy(unit.to + w8_place(r, group * kGroupedInputs).scale, scale, sizeof(float));
        }
        const uint8_t* from = source.weights + row * unit.inputs;
        for (int64_t input = 0; input < unit.inputs; ++input) {
            unit.to[w8_place(r, input).byte] = from[input];
        }
    }
}

}  // namespace tessera

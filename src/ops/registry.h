// The operator registry: what `tessera ops list | test | bench` walks. One line an operator, in registry.cc.
#pragma once

#include <span>
#include <string_view>
#include <vector>

#include "ops/op_case.h"

namespace tessera {

struct OpEntry {
    std::string_view name;
    std::string_view summary;
    std::vector<OpCase> (*cases)();
    // Most that an element may differ from the reference; 0 = the same values.
    std::string_view exactness;
};

std::span<const OpEntry> op_registry();

}  // namespace tessera

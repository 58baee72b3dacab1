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
    std::string_view agreement;  // with the reference, over all instruction sets
    std::vector<OpCase> (*cases)();
};

std::span<const OpEntry> op_registry();

}  // namespace tessera

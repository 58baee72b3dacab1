// `tessera ops test | bench --device cuda`: the cases of the registry, run and printed.
#pragma once

#include <string_view>

#include "base/status.h"

namespace tessera {

// One line an operator on standard output, and one for each failed case; the number of failed cases. An empty
// name: all operators. A Status when there is no such operator or no device.
Result<int> test_cuda_operators(std::string_view name);

// A table, or one JSON object a line.
Status bench_cuda_operators(std::string_view name, bool json);

}  // namespace tessera

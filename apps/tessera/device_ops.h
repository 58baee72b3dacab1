// The CUDA side of `tessera ops`: one definition in a build with CUDA, another in a build without it.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"

namespace tessera {

// What --device may name.
std::vector<std::string> op_devices();

// The number of failed cases.
Result<int> test_cuda_ops(std::string_view name);
Status bench_cuda_ops(std::string_view name, bool json);

}  // namespace tessera

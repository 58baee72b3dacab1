// The CUDA side of `tessera ops`: one definition in a build with CUDA, another in a build without it.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"

namespace tessera {

// Empty in a build without CUDA.
std::vector<std::string_view> cuda_op_names();

struct DeviceOpsArgs {
    std::string name;   // of one operator; empty: all
    uint64_t seed = 1;  // of the random inputs
    bool small = false;
    bool json = false;
    std::string only;  // bench: the cases with this in shape or dtype; empty: all
};

Status list_cuda_ops();
// The number of failed cases.
Result<int> test_cuda_ops(const DeviceOpsArgs& args);
Status bench_cuda_ops(const DeviceOpsArgs& args);

}  // namespace tessera

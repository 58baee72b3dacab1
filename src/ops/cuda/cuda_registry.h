// The operators of the CUDA backend: what the device's test program and `tessera ops --device cuda` walk. One
// line an operator, in cuda_registry.cc.
#pragma once

#include <span>
#include <string_view>
#include <vector>

#include "ops/cuda/cuda_case.h"

namespace tessera {

struct CudaOpEntry {
    std::string_view name;
    std::string_view summary;
    std::string_view agreement;  // with the reference
    std::vector<CudaOpCase> (*cases)();
};

std::span<const CudaOpEntry> cuda_op_registry();

}  // namespace tessera

// `tessera ops list | test | bench --device cuda`: the cases of the registry, run and printed.
#pragma once

#include <cstdint>
#include <string_view>
#include <vector>

#include "base/status.h"

namespace tessera {

struct CudaReportArgs {
    std::string_view name;  // of one operator; empty: all
    uint64_t seed = 1;      // of the random inputs
    bool small = false;     // test: the small cases alone, for compute-sanitizer
    bool json = false;      // bench: one JSON object a line in place of a table
    std::string_view only;  // bench: the cases with this in shape or dtype; empty: all
};

void list_cuda_operators();
std::vector<std::string_view> cuda_operator_names();

// One line an operator on standard output, and one for each failed case; the number of failed cases. A Status
// when there is no such operator or no device.
Result<int> test_cuda_operators(const CudaReportArgs& args);

// One line a case on standard output. A Status as above, when there is no such case, or when a case differs
// from its reference: each such is named on standard error.
Status bench_cuda_operators(const CudaReportArgs& args);

}  // namespace tessera

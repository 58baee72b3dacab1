#include "device_ops.h"

#include "ops/cuda/cuda_report.h"

namespace tessera {

std::vector<std::string> op_devices() {
    return {"cpu", "cuda"};
}

Result<int> test_cuda_ops(std::string_view name) {
    return test_cuda_operators(name);
}

Status bench_cuda_ops(std::string_view name, bool json) {
    return bench_cuda_operators(name, json);
}

}  // namespace tessera

#include "device_ops.h"

#include "cpu_only/without_cuda.h"

namespace tessera {

std::vector<std::string_view> cuda_op_names() {
    return {};
}

Status list_cuda_ops() {
    return without_cuda();
}

Result<int> test_cuda_ops(const DeviceOpsArgs&) {
    return without_cuda();
}

Status bench_cuda_ops(const DeviceOpsArgs&) {
    return without_cuda();
}

}  // namespace tessera

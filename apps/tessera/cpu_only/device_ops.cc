#include "device_ops.h"

namespace tessera {
namespace {

Status without_cuda() {
    return unimplemented("this build of tessera has no CUDA backend; build the preset cuda");
}

}  // namespace

std::vector<std::string> op_devices() {
    return {"cpu"};
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

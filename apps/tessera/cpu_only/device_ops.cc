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

Result<int> test_cuda_ops(std::string_view) {
    return without_cuda();
}

Status bench_cuda_ops(std::string_view, bool) {
    return without_cuda();
}

}  // namespace tessera

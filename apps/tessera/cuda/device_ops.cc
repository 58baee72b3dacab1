#include "device_ops.h"

#include "ops/cuda/cuda_report.h"

namespace tessera {
namespace {

CudaReportArgs report_args(const DeviceOpsArgs& args) {
    return {.name = args.name, .seed = args.seed, .small = args.small, .json = args.json, .only = args.only};
}

}  // namespace

std::vector<std::string_view> cuda_op_names() {
    return cuda_operator_names();
}

Status list_cuda_ops() {
    list_cuda_operators();
    return {};
}

Result<int> test_cuda_ops(const DeviceOpsArgs& args) {
    return test_cuda_operators(report_args(args));
}

Status bench_cuda_ops(const DeviceOpsArgs& args) {
    return bench_cuda_operators(report_args(args));
}

}  // namespace tessera

#include "device/cuda/cuda_check.h"

#include <fmt/format.h>
#include <string>

#include "base/check.h"

namespace tessera {
namespace {

std::string describe(cudaError_t error) {
    return fmt::format("{} ({})", cudaGetErrorString(error), cudaGetErrorName(error));
}

}  // namespace

void cuda_failed(cudaError_t error, std::source_location where) {
    check_failed("CUDA: " + describe(error), where);
}

Status cuda_status(cudaError_t error, std::string_view what) {
    if (error == cudaSuccess) {
        return {};
    }
    const StatusCode code =
        error == cudaErrorMemoryAllocation ? StatusCode::kResourceExhausted : StatusCode::kUnavailable;
    return {code, fmt::format("{}: {}", what, describe(error))};
}

}  // namespace tessera

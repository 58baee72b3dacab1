// The CUDA side of the commands that run a model: one definition in a build with CUDA, another in a build
// without it.
#pragma once

#include <memory>

#include "base/status.h"
#include "engine_setup.h"
#include "model_setup.h"
#include "runner/runner.h"

namespace tessera {

// An open device with its memory budget: at most `utilization` of its memory.
Result<std::shared_ptr<CudaDevice>> open_cuda_device(double utilization);
// With the weights copied to the device. The model must not outlive it.
Result<std::unique_ptr<Hy3Model>> make_cuda_model(CudaDevice& device, const LoadedModel& loaded,
                                                  const ModelSetup& setup, DType kv_dtype);

struct DeviceRunner {
    std::unique_ptr<Runner> runner;  // owns the model and the device
    int32_t num_pages = 0;
};
// `model` was made on a device. num_pages: 0 = what the memory budget has left. Prints the table of device
// memory.
Result<DeviceRunner> make_cuda_runner(ModelBundle model, const EngineOptions& options, int32_t num_pages);

}  // namespace tessera

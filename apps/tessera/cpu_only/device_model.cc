#include "device_model.h"

#include "cpu_only/without_cuda.h"

namespace tessera {

Result<std::shared_ptr<CudaDevice>> open_cuda_device(double) {
    return without_cuda();
}

Result<std::unique_ptr<Hy3Model>> make_cuda_model(CudaDevice&, const LoadedModel&, const ModelSetup&, DType) {
    return without_cuda();
}

Result<DeviceRunner> make_cuda_runner(ModelBundle, const EngineOptions&, int32_t) {
    return without_cuda();
}

}  // namespace tessera

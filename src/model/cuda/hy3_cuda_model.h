// CudaModel: Hy3Model on a CUDA device. Through the base class's interface inputs and outputs are host memory
// and every call waits for its result, as `score` and `eval` need it; a runner launches on device() instead.
#pragma once

#include <memory>
#include <optional>

#include "device/cuda/device_props.h"
#include "device/memory_budget.h"
#include "model/hy3_model.h"

namespace tessera {

class DeviceForward;

struct CudaModelOptions {
    ModelOptions model;  // kv_dtype: kBFloat16 or kFloat8E4M3
    int32_t sequences_max = 1;
    int32_t positions_max = 0;  // the longest sequence
    bool deterministic = false;
    // The weights' views have no data (random_weights()): elements are drawn on the device from this seed.
    std::optional<uint64_t> random_seed;
};

class CudaModel : public Hy3Model {
  public:
    // Copies the weights to the device; `weights` and its memory may go afterwards. The device must be open
    // on the calling thread; the budget must outlive the model. Refuses what the kernels cannot compute,
    // naming the field, and what does not fit, with the numbers.
    static Result<std::unique_ptr<CudaModel>> create(const ModelConfig& config, const ModelWeights& weights,
                                                     const CudaModelOptions& options,
                                                     const DeviceProps& device, MemoryBudget& budget);

    virtual DeviceForward& device() = 0;
    virtual MemoryBudget& budget() = 0;
};

}  // namespace tessera

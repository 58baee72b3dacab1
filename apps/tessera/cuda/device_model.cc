#include "device_model.h"

#include <algorithm>
#include <cstdio>

#include "base/build_mode.h"
#include "base/check.h"
#include "device/cuda/device_props.h"
#include "device/memory_budget.h"
#include "model/cuda/hy3_cuda_model.h"
#include "runner/cuda/cuda_runner.h"

namespace tessera {

struct CudaDevice {
    DeviceProps props;
    MemoryBudget budget;
    CudaModel* model = nullptr;  // the one made on it
};

namespace {

class OwningRunner final : public Runner {
  public:
    OwningRunner(ModelBundle model, std::unique_ptr<Runner> runner)
        : model_(std::move(model)), runner_(std::move(runner)) {}

    void launch(StepPlan plan) override { runner_->launch(std::move(plan)); }
    StepResult collect() override { return runner_->collect(); }
    int max_in_flight() const override { return runner_->max_in_flight(); }

  private:
    ModelBundle model_;
    std::unique_ptr<Runner> runner_;
};

}  // namespace

Result<std::shared_ptr<CudaDevice>> open_cuda_device(double utilization) {
    Result<DeviceProps> props = open_device(0);
    if (!props.ok()) {
        return props.status();
    }
    return std::make_shared<CudaDevice>(CudaDevice{*props, MemoryBudget(usable_bytes(*props, utilization))});
}

Result<std::unique_ptr<Hy3Model>> make_cuda_model(CudaDevice& device, const LoadedModel& loaded,
                                                  const ModelSetup& setup, DType kv_dtype) {
    const auto context = static_cast<int32_t>(loaded.config.max_position_embeddings);
    CudaModelOptions options;
    options.model = {.kv_dtype = kv_dtype,
                     .weight_only = setup.weight_only,
                     .tokens_max = setup.tokens_max,
                     .logit_rows_max = setup.logit_rows_max};
    options.sequences_max = setup.sequences_max;
    options.deterministic = setup.deterministic;
    options.positions_max = setup.positions_max > 0 ? std::min(setup.positions_max, context) : context;
    Result<std::unique_ptr<CudaModel>> model =
        CudaModel::create(loaded.config, loaded.weights, options, device.props, device.budget);
    if (!model.ok()) {
        return model.status();
    }
    device.model = model->get();
    return std::unique_ptr<Hy3Model>(model.take());
}

Result<DeviceRunner> make_cuda_runner(ModelBundle model, const EngineOptions& options, int32_t num_pages) {
    check(model.device != nullptr && model.device->model != nullptr, "make_cuda_runner: not a CUDA model");
    const CudaDevice& device = *model.device;
    Result<std::unique_ptr<CudaRunner>> runner =
        CudaRunner::create(*device.model, {.num_pages = num_pages,
                                           .max_num_seqs = options.max_num_seqs,
                                           .max_num_batched_tokens = options.max_num_batched_tokens,
                                           .poison = kDebugBuild});
    if (!runner.ok()) {
        return runner.status();
    }
    std::fprintf(stderr, "device memory of %s:\n%s", device.props.name.c_str(),
                 device.budget.table().c_str());
    DeviceRunner out;
    out.num_pages = (*runner)->num_pages();
    out.runner = std::make_unique<OwningRunner>(std::move(model), runner.take());
    return out;
}

}  // namespace tessera

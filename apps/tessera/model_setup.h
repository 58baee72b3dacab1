// A model without an engine around it: for score and eval.
#pragma once

#include <memory>
#include <string>
#include <string_view>

#include "base/status.h"
#include "base/thread_pool.h"
#include "model/hy3_model.h"
#include "types/model_config.h"
#include "weights/loader.h"

namespace tessera {

struct ModelSetup {
    std::string folder;
    std::string device = "cpu";           // or cuda
    std::string kv_cache_dtype = "auto";  // parse_kv_dtype()
    int32_t threads = 0;                  // 0 = the machine's
    int32_t tokens_max = 512;             // of one forward pass
    int32_t logit_rows_max = 512;
    // CUDA only.
    int32_t sequences_max = 1;  // of one forward pass
    int32_t positions_max = 0;  // the longest sequence; 0 = the model's context
    double gpu_memory_utilization = 0.9;
    bool weight_only = false;
    bool deterministic = false;  // CUDA: batch-invariant
    bool progress = true;        // shown when standard error is a terminal
};

struct CudaDevice;  // device_model.h

struct ModelBundle {
    ModelConfig config;
    GenerationDefaults generation;
    std::array<uint8_t, 32> fingerprint{};
    std::vector<float> kv_scales;
    int64_t weight_bytes = 0;
    std::unique_ptr<ThreadPool> threads;
    std::shared_ptr<CudaDevice> device;  // null on the CPU
    std::unique_ptr<Hy3Model> model;     // on the device, where there is one
};

Result<ModelBundle> make_model(const ModelSetup& setup);
// auto is float32 on the CPU and bfloat16 on CUDA.
Result<DType> parse_kv_dtype(const std::string& device, const std::string& name);
// Memory is taken page by page as it is used: what is larger than the machine would only fail under load.
// `what` is the message's subject, `advice` says what would need less.
Status check_host_memory(std::string_view what, double bytes, std::string_view advice);
// 0 = what the process may use, at most 64.
int32_t resolve_threads(int32_t threads);

}  // namespace tessera

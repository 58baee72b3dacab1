// A model without an engine around it: for score and eval.
#pragma once

#include <memory>
#include <string>

#include "base/status.h"
#include "base/thread_pool.h"
#include "model/hy3_model.h"
#include "types/model_config.h"

namespace tessera {

struct ModelSetup {
    std::string folder;
    std::string kv_cache_dtype = "auto";  // auto (= float32 on the CPU), float32, bfloat16
    int32_t threads = 0;                  // 0 = the machine's
    int32_t tokens_max = 512;             // of one forward pass
    int32_t logit_rows_max = 512;
    bool weight_only = false;
    bool progress = true;  // shown when standard error is a terminal
};

struct ModelBundle {
    ModelConfig config;
    GenerationDefaults generation;
    std::array<uint8_t, 32> fingerprint{};
    std::vector<float> kv_scales;
    int64_t weight_bytes = 0;
    std::unique_ptr<ThreadPool> threads;
    std::unique_ptr<Hy3Model> model;
};

Result<ModelBundle> make_model(const ModelSetup& setup);
Result<DType> parse_kv_dtype(const std::string& name);
// 0 = what the process may use, at most 64.
int32_t resolve_threads(int32_t threads);

}  // namespace tessera

// From a model folder and options to a running engine: shared by serve, generate, chat and bench.
#pragma once

#include <memory>
#include <string>

#include "base/status.h"
#include "base/thread_pool.h"
#include "engine/engine.h"
#include "text/tokenizer.h"
#include "types/model_config.h"

namespace tessera {

struct EngineOptions {
    std::string model;  // folder
    std::string device = "cpu";
    std::string kv_cache_dtype = "auto";  // auto (= float32 on the CPU), float32, bfloat16
    int32_t threads = 0;                  // 0 = the machine's
    int32_t max_model_len = 0;            // 0 = the model's max_position_embeddings
    int32_t max_num_seqs = 64;
    int32_t max_num_batched_tokens = 512;
    int64_t kv_cache_bytes = 0;  // 0 = 1 GiB, or what one request of max_model_len needs, if that is more
    int32_t num_pages = 0;       // 0 = from kv_cache_bytes
    bool prefix_caching = true;
    bool weight_only = false;
    int32_t max_queued_requests = 4096;
    int64_t max_queued_tokens = 0;
    bool progress = false;  // loading progress on standard error
};

// Members are destroyed bottom up: the engine first.
struct EngineBundle {
    ModelConfig config;
    GenerationDefaults generation;
    int32_t max_model_len = 0;
    int32_t num_pages = 0;
    int64_t kv_cache_bytes = 0;
    int64_t weight_bytes = 0;
    std::string kv_cache_dtype;
    int32_t threads = 0;
    std::unique_ptr<Tokenizer> tokenizer;
    std::unique_ptr<Engine> engine;
};

Result<EngineBundle> make_engine(const EngineOptions& options);

}  // namespace tessera

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
    std::string model;                    // folder
    std::string device = "cpu";           // or cuda
    std::string kv_cache_dtype = "auto";  // parse_kv_dtype()
    int32_t threads = 0;                  // 0 = the machine's
    int32_t max_model_len = 0;            // 0 = the model's max_position_embeddings
    int32_t max_num_seqs = 64;
    int32_t max_num_batched_tokens = 0;  // 0 = the device's: batched_tokens()
    // 0 = on the CPU 1 GiB, or what one request of max_model_len needs, if that is more; on CUDA what
    // gpu_memory_utilization leaves.
    int64_t kv_cache_bytes = 0;
    int32_t num_pages = 0;                              // 0 = from kv_cache_bytes
    std::string pool_flag = "--kv-cache-memory-bytes";  // that sizes the pool, for messages
    double gpu_memory_utilization =
        0.9;  // CUDA: share of the device's memory that may be used for everything
    bool prefix_caching = true;
    // A prefill chunk beside decoding streams is cut so that the step stays under this; 0 = not cut.
    double target_tpot_s = 0;
    bool weight_only = false;
    bool deterministic = false;  // CUDA: batch-invariant, at a cost (docs/PERFORMANCE.md)
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

// Tokens of a step unless --max-num-batched-tokens says otherwise: on CUDA enough for the experts' products
// to be bound by arithmetic (some 170 rows for each of 192 experts, 8 chosen), yet a step beside decoding
// streams stays short.
int32_t default_batched_tokens(const std::string& device);
// max_num_batched_tokens, or where it is 0 the default, but at least one token for each sequence.
int32_t batched_tokens(const EngineOptions& options);

Result<EngineBundle> make_engine(const EngineOptions& options);

}  // namespace tessera

#include "model_options.h"

#include <fmt/format.h>

namespace tessera {
namespace {

// ModelSetup and EngineOptions have these members under the same names.
template <typename Options>
void add_options(CLI::App& app, Options& options) {
    app.add_option("--device", options.device, "cpu or cuda")
        ->check(CLI::IsMember({"cpu", "cuda"}))
        ->capture_default_str();
    app.add_option("--kv-cache-dtype", options.kv_cache_dtype,
                   "cpu: auto (= float32), float32, bfloat16; cuda: auto (= bfloat16), bfloat16, fp8")
        ->capture_default_str();
    app.add_option("--threads", options.threads, "0 = all the cores that the process may use")
        ->check(CLI::Range(0, 1024));
    app.add_flag("--weight-only", options.weight_only, "FP8 checkpoints: leave activations unquantised");
    app.add_flag(
        "--deterministic", options.deterministic,
        "a request's result is the same bits in any company, chunking and after any preemption: always so on "
        "the CPU, slower on CUDA");
}

}  // namespace

void add_model_options(CLI::App& app, ModelSetup& setup) {
    add_options(app, setup);
}

void add_model_options(CLI::App& app, EngineOptions& options) {
    add_options(app, options);
}

void add_size_options(CLI::App& app, EngineOptions& options) {
    app.add_option("--max-model-len,--context-length", options.max_model_len,
                   "prompt and output of one request; 0 = the model's context")
        ->transform(size_value());
    app.add_option(
           "--kv-cache-memory-bytes", options.kv_cache_bytes,
           "the KV pool's size, e.g. 4GiB; 0 = on the CPU 1 GiB, or what one longest request needs; on "
           "CUDA what --gpu-memory-utilization leaves")
        ->transform(size_value());
    app.add_option("--max-num-seqs,--max-running-requests", options.max_num_seqs, "sequences in one step")
        ->check(CLI::Range(1, 65536))
        ->capture_default_str();
    app.add_option("--max-num-batched-tokens,--chunked-prefill-size", options.max_num_batched_tokens,
                   fmt::format("tokens in one step; default: cpu {}, cuda {}, but at least --max-num-seqs",
                               default_batched_tokens("cpu"), default_batched_tokens("cuda")))
        ->transform(size_value())
        ->check(CLI::Range(1, 1 << 20));
}

}  // namespace tessera

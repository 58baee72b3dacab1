#include "model_options.h"

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

}  // namespace tessera

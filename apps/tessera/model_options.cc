#include "model_options.h"

namespace tessera {

void add_model_options(CLI::App& app, ModelSetup& setup) {
    app.add_option("--device", setup.device, "cpu or cuda")
        ->check(CLI::IsMember({"cpu", "cuda"}))
        ->capture_default_str();
    app.add_option("--kv-cache-dtype", setup.kv_cache_dtype,
                   "cpu: auto (= float32), float32, bfloat16; cuda: auto (= bfloat16), bfloat16, fp8")
        ->capture_default_str();
    app.add_option("--threads", setup.threads, "0 = all the cores that the process may use")
        ->check(CLI::Range(0, 1024));
    app.add_flag("--weight-only", setup.weight_only, "FP8 checkpoints: leave activations unquantised");
}

}  // namespace tessera

#include "model_setup.h"

#include <algorithm>
#include <cstdio>
#include <fmt/format.h>
#include <sched.h>
#include <unistd.h>

#include "device_model.h"
#include "weights/loader.h"

namespace tessera {
namespace {

std::function<void(int64_t, int64_t)> progress_on_terminal(bool wanted) {
    if (!wanted || isatty(STDERR_FILENO) == 0) {
        return {};
    }
    return [](int64_t done, int64_t total) {
        std::fprintf(stderr, "\rloading weights: %3d %% of %.1f MB",
                     static_cast<int>(100 * done / std::max<int64_t>(total, 1)),
                     static_cast<double>(total) * 1e-6);
        if (done >= total) {
            std::fputc('\n', stderr);
        }
    };
}

}  // namespace

Status check_host_memory(std::string_view what, double bytes, std::string_view advice) {
    const double machine =
        static_cast<double>(sysconf(_SC_PHYS_PAGES)) * static_cast<double>(sysconf(_SC_PAGESIZE));
    if (bytes > machine) {
        return invalid_argument(
            fmt::format("{} ({:.1f} GB) is larger than this machine's memory ({:.1f} GB): {}", what,
                        bytes * 1e-9, machine * 1e-9, advice));
    }
    return {};
}

int32_t resolve_threads(int32_t threads) {
    if (threads > 0) {
        return threads;
    }
    cpu_set_t allowed;
    CPU_ZERO(&allowed);
    if (sched_getaffinity(0, sizeof(allowed), &allowed) != 0) {
        return 1;
    }
    return std::clamp(CPU_COUNT(&allowed), 1, 64);
}

Result<DType> parse_kv_dtype(const std::string& device, const std::string& name) {
    const bool cuda = device == "cuda";
    if (name == "bfloat16" || name == "bf16" || (cuda && name == "auto")) {
        return DType::kBFloat16;
    }
    if (!cuda && (name == "auto" || name == "float32")) {
        return DType::kFloat32;
    }
    if (cuda && (name == "fp8" || name == "fp8_e4m3")) {
        return DType::kFloat8E4M3;
    }
    return invalid_argument(fmt::format("--kv-cache-dtype {}: {}", name,
                                        cuda ? "CUDA has auto (= bfloat16), bfloat16 and fp8"
                                             : "the CPU has auto (= float32), float32 and bfloat16"));
}

Result<ModelBundle> make_model(const ModelSetup& setup) {
    Result<DType> kv_dtype = parse_kv_dtype(setup.device, setup.kv_cache_dtype);
    if (!kv_dtype.ok()) {
        return kv_dtype.status();
    }
    // What can be wrong without the device comes before it.
    if (const Result<ModelConfig> config = load_model_config(setup.folder); !config.ok()) {
        return config.status();
    }
    ModelBundle bundle;
    if (setup.device == "cuda") {
        Result<std::shared_ptr<CudaDevice>> device = open_cuda_device(setup.gpu_memory_utilization);
        if (!device.ok()) {
            return device.status();
        }
        bundle.device = device.take();
    }
    const int32_t threads = resolve_threads(setup.threads);
    Result<LoadedModel> loaded =
        load_model(setup.folder, {.threads = threads, .progress = progress_on_terminal(setup.progress)});
    if (!loaded.ok()) {
        return loaded.status();
    }
    bundle.threads = std::make_unique<ThreadPool>(threads);
    Result<std::unique_ptr<Hy3Model>> model = bundle.device != nullptr
                                                  ? make_cuda_model(*bundle.device, *loaded, setup, *kv_dtype)
                                                  : Hy3Model::create(loaded->config, loaded->weights,
                                                                     {.kv_dtype = *kv_dtype,
                                                                      .weight_only = setup.weight_only,
                                                                      .tokens_max = setup.tokens_max,
                                                                      .logit_rows_max = setup.logit_rows_max},
                                                                     *bundle.threads);
    if (!model.ok()) {
        return model.status();
    }
    loaded->drop_pages();
    bundle.model = model.take();
    bundle.config = loaded->config;
    bundle.generation = loaded->generation;
    bundle.fingerprint = loaded->fingerprint;
    bundle.weight_bytes = loaded->weight_bytes;
    for (const LayerWeights& layer : loaded->weights.layers) {
        bundle.kv_scales.push_back(layer.attention.k_scale);
        bundle.kv_scales.push_back(layer.attention.v_scale);
    }
    return bundle;
}

}  // namespace tessera

#include "weights/fp8_export.h"

#include <cmath>
#include <fmt/format.h>

#include "weights/checkpoint/files.h"
#include "weights/export/fp8_tensors.h"
#include "weights/export/model_folder.h"
#include "weights/export_folder.h"

namespace tessera {
namespace {

constexpr std::string_view kKvScalesName = "kv_cache_scales.safetensors";

json::Value quantization_config() {
    return json::Value::object(
        {{"quant_method", "fp8"},
         {"activation_scheme", "static"},
         {"ignored_layers", json::Value::array({json::Value("lm_head"), json::Value("model.embed_tokens")})},
         {"kv_cache_scheme", "static"}});
}

Status check_limits(const Fp8Export& options) {
    for (size_t i = 0; i < options.layers.size(); ++i) {
        const LayerLimits& layer = options.layers[i];
        for (const float limit : {layer.attention_input, layer.output_input, layer.key, layer.value,
                                  layer.mlp_input, layer.expert_down_input, layer.shared_down_input}) {
            if (!std::isfinite(limit) || limit < 0) {
                return invalid_argument(
                    fmt::format("layer {}: a measured magnitude is {}; it must be finite", i, limit));
            }
        }
    }
    return {};
}

}  // namespace

Status check_fp8_export(const LoadedModel& model, const std::string& folder) {
    return check_quantise(model, folder);
}

Status export_fp8(const LoadedModel& model, const Fp8Export& options, const std::string& folder,
                  ThreadPool& pool) {
    const std::string target = without_trailing_slash(folder);
    Status status = check_fp8_export(model, target);
    status = status.ok() ? check_limits(options) : status;
    if (!status.ok()) {
        return status;
    }
    Result<PendingFolder> pending = PendingFolder::create(target);
    if (!pending.ok()) {
        return pending.status();
    }
    const std::string& path = pending->path();
    const Result<Fp8Tensors> tensors = fp8_tensors(model.config, model.weights, options.layers, pool);
    if (!tensors.ok()) {
        return tensors.status();
    }
    std::vector<IndexEntry> beside;
    for (const OutputTensor& scale : tensors->kv_scales) {
        beside.emplace_back(scale.name, kKvScalesName);
    }
    status = write_shards(path, tensors->weights, beside,
                          {.bytes_max = options.shard_bytes_max, .progress = options.progress});
    status = status.ok() ? write_safetensors(join_path(path, std::string(kKvScalesName)), tensors->kv_scales)
                         : status;
    status = status.ok() ? write_config(model.folder, path, quantization_config()) : status;
    status = status.ok() ? copy_small_files(model.folder, path) : status;
    return pending->finish(status, target);
}

}  // namespace tessera

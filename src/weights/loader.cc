#include "weights/loader.h"

#include <algorithm>
#include <filesystem>

#include "base/thread_pool.h"
#include "weights/bind/binder.h"
#include "weights/checkpoint/checkpoint.h"
#include "weights/checkpoint/files.h"
#include "weights/checkpoint/fingerprint.h"
#include "weights/config/config.h"
#include "weights/config/quant_config.h"

namespace tessera {
namespace {

struct FolderConfig {
    std::string text;
    ModelConfig config;
    QuantConfig quant;
    GenerationDefaults generation;
};

// ModelOpt says beside config.json how the weights are stored.
Result<QuantConfig> read_quant_config(const std::string& folder, const json::Value& config,
                                      const std::string& config_file) {
    const std::string file = join_path(folder, "hf_quant_config.json");
    std::error_code error;
    if (config.find("quantization_config") != nullptr || !std::filesystem::exists(file, error)) {
        return parse_quant_config(config, config_file);
    }
    const Result<std::string> text = read_text_file(file, kConfigBytesMax);
    if (!text.ok()) {
        return text.status();
    }
    const Result<json::Value> object = parse_json_object(*text, file);
    return object.ok() ? parse_hf_quant_config(*object, file) : Result<QuantConfig>(object.status());
}

Result<FolderConfig> read_configs(const std::string& folder) {
    if (Status status = check_model_folder(folder); !status.ok()) {
        return status;
    }
    const std::string file = join_path(folder, "config.json");
    Result<std::string> text = read_text_file(file, kConfigBytesMax);
    if (!text.ok()) {
        return text.status();
    }
    const Result<json::Value> object = parse_json_object(*text, file);
    if (!object.ok()) {
        return object.status();
    }
    Result<ModelConfig> config = model_config_from_json(*object, file);
    if (!config.ok()) {
        return config.status();
    }
    Result<QuantConfig> quant = read_quant_config(folder, *object, file);
    if (!quant.ok()) {
        return quant.status();
    }
    const Result<GenerationDefaults> generation = load_generation_defaults(folder, *config);
    if (!generation.ok()) {
        return generation.status();
    }
    return FolderConfig{text.take(), config.take(), quant.take(), *generation};
}

}  // namespace

void LoadedModel::drop_pages() const {
    if (memory != nullptr) {
        static_cast<const Checkpoint*>(memory.get())->drop_pages();
    }
}

Result<LoadedModel> load_model(const std::string& folder, const LoadOptions& options) {
    Result<FolderConfig> configs = read_configs(folder);
    if (!configs.ok()) {
        return configs.status();
    }
    ThreadPool pool(std::max(1, options.threads));
    Result<std::shared_ptr<Checkpoint>> opened = Checkpoint::open(folder, pool);
    if (!opened.ok()) {
        return opened.status();
    }
    Checkpoint& checkpoint = **opened;
    // Every name, shape and type is checked before the first gigabyte is read.
    Result<ModelWeights> weights = bind_weights(configs->config, configs->quant, checkpoint);
    if (!weights.ok()) {
        return weights.status();
    }
    if (Status status = checkpoint.touch(pool, options.progress); !status.ok()) {
        return status;
    }
    LoadedModel model;
    model.folder = folder;
    model.config = std::move(configs->config);
    model.generation = configs->generation;
    model.quantised = configs->quant.fp8 || configs->quant.int4 != Int4Checkpoint::kNone;
    model.weights = weights.take();
    model.fingerprint = checkpoint_fingerprint(checkpoint, configs->text);
    model.weight_bytes = checkpoint.tensor_bytes();
    model.memory = opened.take();
    return model;
}

}  // namespace tessera

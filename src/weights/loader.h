// Opens a Hugging Face model folder: config.json, generation_config.json, *.safetensors. Every error names
// the file and, where there is one, the tensor or key.
#pragma once

#include <array>
#include <functional>
#include <memory>
#include <string>

#include "base/status.h"
#include "types/model_config.h"
#include "weights/model_weights.h"

namespace tessera {

struct LoadOptions {
    int threads = 2;
    // Called with bytes done and in all, from any loading thread, a few times a second. May be empty.
    std::function<void(int64_t done, int64_t total)> progress;
};

// Owns the memory maps that ModelWeights points into; keep it as long as the views are used.
struct LoadedModel {
    std::string folder;
    ModelConfig config;
    GenerationDefaults generation;
    bool quantised = false;  // by its quantization_config, whatever became of the weights at load
    ModelWeights weights;
    // SHA-256 over names, dtypes, shapes and sampled bytes of all tensors and over config.json: enters the
    // page keys.
    std::array<uint8_t, 32> fingerprint{};
    int64_t weight_bytes = 0;
    std::shared_ptr<const void> memory;
    // Tells the kernel that the mapped pages will not be read soon (after the model has packed its own
    // copies).
    void drop_pages() const;
};

Result<ModelConfig> parse_model_config(std::string_view json_text);  // config.json's text
Result<ModelConfig> load_model_config(const std::string& folder);
// Neutral values when the file is absent; an error when it is malformed. Also adds its EOS ids to config.
Result<GenerationDefaults> load_generation_defaults(const std::string& folder, ModelConfig& config);
Result<LoadedModel> load_model(const std::string& folder, const LoadOptions& options = {});

}  // namespace tessera

#include "weights/fp8_export.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <fcntl.h>
#include <filesystem>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/json.h"
#include "weights/checkpoint/files.h"
#include "weights/config/config.h"
#include "weights/export/fp8_tensors.h"
#include "weights/export/pretty_json.h"

namespace tessera {
namespace {

namespace fs = std::filesystem;

constexpr std::string_view kKvScalesName = "kv_cache_scales.safetensors";

// A folder beside the target that disappears unless it is renamed.
class PendingFolder {
  public:
    static Result<PendingFolder> create(const std::string& target) {
        std::string path = target + ".partial-XXXXXX";
        if (::mkdtemp(path.data()) == nullptr) {
            return invalid_argument(
                fmt::format("{}: no folder can be made there: {}", target, std::strerror(errno)));
        }
        PendingFolder folder(std::move(path));
        if (::chmod(folder.path().c_str(), 0755) != 0) {
            return invalid_argument(fmt::format("{}: {}", folder.path(), std::strerror(errno)));
        }
        return folder;
    }
    ~PendingFolder() {
        if (!path_.empty()) {
            std::error_code ignored;
            fs::remove_all(path_, ignored);
        }
    }
    PendingFolder(PendingFolder&& other) noexcept : path_(std::exchange(other.path_, {})) {}
    PendingFolder& operator=(PendingFolder&&) = delete;
    PendingFolder(const PendingFolder&) = delete;

    const std::string& path() const { return path_; }

    // Fails where the target has come to exist meanwhile.
    Status rename_to(const std::string& target) {
        if (::renameat2(AT_FDCWD, path_.c_str(), AT_FDCWD, target.c_str(), RENAME_NOREPLACE) != 0) {
            return invalid_argument(fmt::format("{}: the finished folder cannot be renamed to this: {}",
                                                target, std::strerror(errno)));
        }
        path_.clear();
        return {};
    }

  private:
    explicit PendingFolder(std::string path) : path_(std::move(path)) {}
    std::string path_;
};

std::string without_trailing_slash(std::string folder) {
    while (folder.size() > 1 && folder.back() == '/') {
        folder.pop_back();
    }
    return folder;
}

// What holds weights, or is written anew.
bool is_copied(const fs::directory_entry& entry) {
    static constexpr std::array<std::string_view, 6> kWeights = {".safetensors", ".bin",  ".pt",
                                                                 ".pth",         ".gguf", ".h5"};
    const std::string name = entry.path().filename().string();
    const std::string extension = entry.path().extension().string();
    std::error_code error;
    return entry.is_regular_file(error) && name != "config.json" && !name.ends_with(".index.json") &&
           std::ranges::find(kWeights, extension) == kWeights.end();
}

Status copy_small_files(const std::string& from, const std::string& to) {
    std::error_code error;
    for (fs::directory_iterator it(from, error), end; !error && it != end; it.increment(error)) {
        if (is_copied(*it)) {
            fs::copy_file(it->path(), fs::path(to) / it->path().filename(), error);
            if (error) {
                return data_loss(
                    fmt::format("{}: cannot be copied to {}: {}", it->path().string(), to, error.message()));
            }
        }
    }
    return error ? data_loss(fmt::format("{}: cannot be listed: {}", from, error.message())) : Status();
}

Status write_config(const std::string& from, const std::string& to) {
    const std::string path = join_path(from, "config.json");
    const Result<std::string> text = read_text_file(path, kConfigBytesMax);
    if (!text.ok()) {
        return text.status();
    }
    Result<json::Value> config = json::parse(*text);
    if (!config.ok()) {
        return invalid_argument(fmt::format("{}: {}", path, config.status().message()));
    }
    config->set("quantization_config",
                json::Value::object(
                    {{"quant_method", "fp8"},
                     {"activation_scheme", "static"},
                     {"ignored_layers",
                      json::Value::array({json::Value("lm_head"), json::Value("model.embed_tokens")})},
                     {"kv_cache_scheme", "static"}}));
    return write_text_file(join_path(to, "config.json"), pretty_json(*config) + "\n");
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

Status check_fp8_folder(const std::string& folder) {
    const std::string target = without_trailing_slash(folder);
    std::error_code error;
    if (fs::exists(fs::symlink_status(target, error))) {
        return invalid_argument(fmt::format("{}: exists already; give a folder that does not", folder));
    }
    // Made and removed: permissions alone do not tell (a read-only file system, a file in the way).
    const Result<PendingFolder> trial = PendingFolder::create(target);
    return trial.ok() ? Status() : trial.status();
}

Status check_fp8_export(const LoadedModel& model, const std::string& folder) {
    if (Status status = check_fp8_folder(folder); !status.ok()) {
        return status;
    }
    if (model.weights.layers.front().attention.q.weight_scale.has_value()) {
        return invalid_argument(
            fmt::format("{}: is quantised already; give the model with bfloat16, float16 or float32 weights",
                        model.folder));
    }
    return {};
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
    status = status.ok() ? write_config(model.folder, path) : status;
    status = status.ok() ? copy_small_files(model.folder, path) : status;
    return status.ok() ? pending->rename_to(target) : status;
}

}  // namespace tessera

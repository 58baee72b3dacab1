// A model folder in the making, and the files of it that are not weights.
#pragma once

#include <string>
#include <utility>

#include "base/json.h"
#include "base/status.h"
#include "weights/loader.h"

namespace tessera {

// A folder beside the target that disappears unless it is renamed.
class PendingFolder {
  public:
    static Result<PendingFolder> create(const std::string& target);
    ~PendingFolder();
    PendingFolder(PendingFolder&& other) noexcept : path_(std::exchange(other.path_, {})) {}
    PendingFolder& operator=(PendingFolder&&) = delete;
    PendingFolder(const PendingFolder&) = delete;

    const std::string& path() const { return path_; }

    // Of a good status the folder becomes the target; fails where that has come to exist meanwhile. A bad one
    // comes back and says that nothing is left.
    Status finish(const Status& written, const std::string& target);

  private:
    Status rename_to(const std::string& target);
    explicit PendingFolder(std::string path) : path_(std::move(path)) {}
    std::string path_;
};

std::string without_trailing_slash(std::string folder);

// The files of a model folder that a copy of it needs and that are not written anew.
Status copy_small_files(const std::string& from, const std::string& to);

// config.json with this quantization_config.
Status write_config(const std::string& from, const std::string& to, json::Value quantization_config);

// What every scheme of quantisation asks first: `folder` can be made, and `model` has plain float weights.
Status check_quantise(const LoadedModel& model, const std::string& folder);

}  // namespace tessera

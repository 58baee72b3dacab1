#include "weights/export/model_folder.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <fcntl.h>
#include <filesystem>
#include <fmt/format.h>
#include <sys/stat.h>
#include <unistd.h>

#include "weights/checkpoint/files.h"
#include "weights/config/config.h"
#include "weights/export/pretty_json.h"
#include "weights/export/safetensors_writer.h"
#include "weights/export_folder.h"

namespace tessera {

namespace fs = std::filesystem;

Result<PendingFolder> PendingFolder::create(const std::string& target) {
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

PendingFolder::~PendingFolder() {
    if (!path_.empty()) {
        std::error_code ignored;
        fs::remove_all(path_, ignored);
    }
}

Status PendingFolder::rename_to(const std::string& target) {
    if (::renameat2(AT_FDCWD, path_.c_str(), AT_FDCWD, target.c_str(), RENAME_NOREPLACE) != 0) {
        return invalid_argument(fmt::format("{}: the finished folder cannot be renamed to this: {}", target,
                                            std::strerror(errno)));
    }
    path_.clear();
    return {};
}

Status PendingFolder::finish(const Status& written, const std::string& target) {
    const Status status = written.ok() ? rename_to(target) : written;
    return status.ok() ? status
                       : Status(status.code(), status.message() + "; the unfinished copy is removed");
}

std::string without_trailing_slash(std::string folder) {
    while (folder.size() > 1 && folder.back() == '/') {
        folder.pop_back();
    }
    return folder;
}

namespace {

// What a checkpoint needs beside its weights and config.json: the tokenizer, the conversation format,
// sampling defaults, code that it may bring, and its licence. Not what describes the original, such as
// README.md.
bool is_copied(const fs::directory_entry& entry) {
    static constexpr std::array<std::string_view, 8> kNames = {"generation_config.json",
                                                               "special_tokens_map.json",
                                                               "added_tokens.json",
                                                               "vocab.json",
                                                               "vocab.txt",
                                                               "merges.txt",
                                                               "chat_template.json",
                                                               "chat_template.jinja"};
    static constexpr std::array<std::string_view, 2> kExtensions = {".py", ".tiktoken"};
    static constexpr std::array<std::string_view, 5> kBeginnings = {"tokenizer", "LICENSE", "License",
                                                                    "LICENCE", "NOTICE"};
    const std::string name = entry.path().filename().string();
    std::error_code error;
    return entry.is_regular_file(error) &&
           (std::ranges::find(kNames, name) != kNames.end() ||
            std::ranges::find(kExtensions, entry.path().extension().string()) != kExtensions.end() ||
            std::ranges::any_of(kBeginnings,
                                [&](std::string_view start) { return name.starts_with(start); }));
}

}  // namespace

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

Status write_config(const std::string& from, const std::string& to, json::Value quantization_config) {
    const std::string path = join_path(from, "config.json");
    const Result<std::string> text = read_text_file(path, kConfigBytesMax);
    if (!text.ok()) {
        return text.status();
    }
    Result<json::Value> config = json::parse(*text);
    if (!config.ok()) {
        return invalid_argument(fmt::format("{}: {}", path, config.status().message()));
    }
    config->set("quantization_config", std::move(quantization_config));
    return write_text_file(join_path(to, "config.json"), pretty_json(*config) + "\n");
}

Status check_export_folder(const std::string& folder) {
    const std::string target = without_trailing_slash(folder);
    if (target.empty()) {
        return invalid_argument("the output folder has no name");
    }
    std::error_code error;
    if (fs::exists(fs::symlink_status(target, error))) {
        return invalid_argument(fmt::format("{}: exists already; give a folder that does not", folder));
    }
    // Made and removed: permissions alone do not tell (a read-only file system, a file in the way).
    const Result<PendingFolder> trial = PendingFolder::create(target);
    return trial.ok() ? Status() : trial.status();
}

Status check_quantise(const LoadedModel& model, const std::string& folder) {
    if (Status status = check_export_folder(folder); !status.ok()) {
        return status;
    }
    if (model.quantised) {
        return invalid_argument(
            fmt::format("{}: is quantised already; give the model with bfloat16, float16 or float32 weights",
                        model.folder));
    }
    return {};
}

}  // namespace tessera

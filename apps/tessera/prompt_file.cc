#include "prompt_file.h"

#include <algorithm>
#include <fmt/format.h>
#include <memory>
#include <zlib.h>

#include "base/json.h"

namespace tessera {
namespace {

// gzread() reads plain files as they are, so one reader serves both.
Result<std::string> read_all(const std::string& path) {
    gzFile file = path == "-" ? gzdopen(0, "rb") : gzopen(path.c_str(), "rb");
    if (file == nullptr) {
        return not_found(fmt::format("cannot open {}", path));
    }
    const std::unique_ptr<gzFile_s, int (*)(gzFile)> closer(file, gzclose);
    std::string text;
    char buffer[1 << 16];
    for (int n = gzread(file, buffer, sizeof(buffer)); n != 0; n = gzread(file, buffer, sizeof(buffer))) {
        if (n < 0) {
            return data_loss(fmt::format("cannot read {}: it is truncated, corrupt or no plain file", path));
        }
        text.append(buffer, static_cast<size_t>(n));
    }
    int error = Z_OK;  // Z_BUF_ERROR: what there was of a cut stream has been read, and the reads succeeded
    gzerror(file, &error);
    if (error != Z_OK && error != Z_STREAM_END) {
        return data_loss(fmt::format("cannot read {}: it is truncated or corrupt", path));
    }
    return text;
}

Result<std::vector<TokenId>> ids_of(const json::Value& object, const std::string& where, int64_t vocab_size) {
    const json::Value* list = object.find("ids");
    if (list == nullptr || !list->is_array()) {
        return invalid_argument(fmt::format("{}: expected an object {{\"ids\": [...]}}", where));
    }
    Result<std::vector<TokenId>> ids = token_ids(*list, "ids", vocab_size);
    if (!ids.ok()) {
        return invalid_argument(fmt::format("{}: {}", where, ids.status().message()));
    }
    if (ids->empty()) {
        return invalid_argument(fmt::format("{}: ids is empty; at least one token is needed", where));
    }
    return ids;
}

}  // namespace

Result<std::vector<TokenId>> token_ids(const json::Value& list, std::string_view key, int64_t vocab_size) {
    std::vector<TokenId> ids;
    for (const json::Value& item : list.items()) {
        const std::optional<int64_t> id = item.as_int64();
        if (!id || *id < 0 || *id >= vocab_size) {
            return invalid_argument(
                fmt::format("{}[{}] must be an integer from 0 to {}", key, ids.size(), vocab_size - 1));
        }
        ids.push_back(static_cast<TokenId>(*id));
    }
    return ids;
}

Result<std::string> read_file(const std::string& path) {
    return read_all(path);
}

Result<std::vector<std::vector<TokenId>>> read_id_file(const std::string& path, int64_t vocab_size) {
    Result<std::string> text = read_all(path);
    if (!text.ok()) {
        return text.status();
    }
    Result<json::Value> root = json::parse(*text);
    if (!root.ok()) {
        return invalid_argument(fmt::format("{}: {}", path, root.status().message()));
    }
    std::vector<std::vector<TokenId>> all;
    const auto add = [&](const json::Value& object, const std::string& where) -> Status {
        Result<std::vector<TokenId>> ids = ids_of(object, where, vocab_size);
        if (ids.ok()) {
            all.push_back(ids.take());
            return {};
        }
        return ids.status();
    };
    if (!root->is_array()) {
        Status status = add(*root, path);
        return status.ok() ? Result(std::move(all)) : Result<std::vector<std::vector<TokenId>>>(status);
    }
    for (size_t i = 0; i < root->items().size(); ++i) {
        if (Status status = add(root->items()[i], fmt::format("{}: item {}", path, i)); !status.ok()) {
            return status;
        }
    }
    if (all.empty()) {
        return invalid_argument(fmt::format("{}: the list is empty; at least one item is needed", path));
    }
    return all;
}

Result<std::vector<std::string>> read_lines(const std::string& path) {
    Result<std::string> text = read_all(path);
    if (!text.ok()) {
        return text.status();
    }
    std::vector<std::string> lines;
    size_t start = 0;
    while (start < text->size()) {
        const size_t end = std::min(text->find('\n', start), text->size());
        lines.push_back(text->substr(start, end - start));
        start = end + 1;
    }
    return lines;
}

bool is_blank(std::string_view line) {
    return line.find_first_not_of(" \t\r") == std::string_view::npos;
}

}  // namespace tessera

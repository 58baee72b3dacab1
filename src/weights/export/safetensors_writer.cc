#include "weights/export/safetensors_writer.h"

#include <cerrno>
#include <cstring>
#include <fcntl.h>
#include <fmt/format.h>
#include <unistd.h>

#include "base/check.h"
#include "base/json.h"

namespace tessera {
namespace {

// A file being written. Every error names the path and the system's reason.
class OutputFile {
  public:
    explicit OutputFile(std::string path) : path_(std::move(path)) {
        fd_ = ::open(path_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0644);
        if (fd_ < 0) {
            fail("cannot be created");
        }
    }
    ~OutputFile() {
        if (fd_ >= 0) {
            ::close(fd_);
        }
    }
    OutputFile(const OutputFile&) = delete;
    OutputFile& operator=(const OutputFile&) = delete;

    void write(std::span<const std::byte> bytes) {
        while (status_.ok() && !bytes.empty()) {
            const ssize_t n = ::write(fd_, bytes.data(), bytes.size());
            if (n < 0 && errno != EINTR) {
                fail("cannot be written");
            } else if (n > 0) {
                bytes = bytes.subspan(static_cast<size_t>(n));
            }
        }
    }
    void write(std::string_view text) { write(std::as_bytes(std::span(text))); }

    // Syncs and closes.
    Status finish() {
        if (status_.ok() && ::fsync(fd_) != 0) {
            fail("cannot be synced");
        }
        if (fd_ >= 0 && ::close(std::exchange(fd_, -1)) != 0 && status_.ok()) {
            fail("cannot be closed");
        }
        return status_;
    }
    bool ok() const { return status_.ok(); }

  private:
    void fail(std::string_view what) {
        status_ = data_loss(fmt::format("{}: {}: {}", path_, what, std::strerror(errno)));
    }

    const std::string path_;
    int fd_ = -1;
    Status status_;
};

json::Value shape_json(const std::vector<int64_t>& shape) {
    json::Value list = json::Value::array();
    for (const int64_t extent : shape) {
        list.push_back(extent);
    }
    return list;
}

std::string header_of(std::span<const OutputTensor> tensors) {
    json::Value header = json::Value::object({{"__metadata__", json::Value::object({{"format", "pt"}})}});
    int64_t offset = 0;
    std::vector<json::Member> members = header.members();
    for (const OutputTensor& tensor : tensors) {
        members.emplace_back(
            tensor.name,
            json::Value::object({{"dtype", tensor.dtype},
                                 {"shape", shape_json(tensor.shape)},
                                 {"data_offsets", json::Value::array({offset, offset + tensor.bytes})}}));
        offset += tensor.bytes;
    }
    std::string text = json::dump(json::Value::object(std::move(members)));
    text.append((8 - text.size() % 8) % 8, ' ');  // the tensors begin at a multiple of 8
    return text;
}

// How many of the tensors go into the next file.
size_t shard_length(std::span<const OutputTensor> tensors, int64_t bytes_max) {
    size_t count = 0;
    int64_t bytes = 0;
    while (count < tensors.size() && (count == 0 || bytes + tensors[count].bytes <= bytes_max)) {
        bytes += tensors[count++].bytes;
    }
    return count;
}

}  // namespace

Status write_safetensors(const std::string& path, std::span<const OutputTensor> tensors,
                         const std::function<bool(int64_t bytes)>& wrote) {
    OutputFile file(path);
    const std::string header = header_of(tensors);
    const uint64_t length = header.size();
    file.write(std::as_bytes(std::span(&length, 1)));
    file.write(header);
    std::vector<std::byte> made;
    for (const OutputTensor& tensor : tensors) {
        const auto bytes = static_cast<size_t>(tensor.bytes);
        if (tensor.make) {
            made.resize(bytes);
            tensor.make(made);
            file.write(made);
        } else {
            check(tensor.data != nullptr || bytes == 0, "write_safetensors: a tensor without bytes");
            file.write({static_cast<const std::byte*>(tensor.data), bytes});
        }
        if (!file.ok()) {
            break;
        }
        if (wrote && !wrote(tensor.bytes)) {
            return {StatusCode::kCancelled, fmt::format("{}: interrupted while it was being written", path)};
        }
    }
    return file.finish();
}

Status write_shards(const std::string& folder, std::span<const OutputTensor> tensors,
                    std::span<const IndexEntry> beside, const ShardOptions& options) {
    std::vector<std::span<const OutputTensor>> shards;
    int64_t total = 0;
    for (size_t begin = 0; begin < tensors.size(); begin += shards.back().size()) {
        const std::span<const OutputTensor> rest = tensors.subspan(begin);
        shards.push_back(rest.first(shard_length(rest, options.bytes_max)));
        for (const OutputTensor& tensor : shards.back()) {
            total += tensor.bytes;
        }
    }
    int64_t done = 0;
    std::vector<json::Member> placement;
    for (size_t i = 0; i < shards.size(); ++i) {
        const std::string name = fmt::format("model-{:05}-of-{:05}.safetensors", i + 1, shards.size());
        const Status status = write_safetensors(join_path(folder, name), shards[i], [&](int64_t bytes) {
            done += bytes;
            return !options.progress || options.progress(done, total);
        });
        if (!status.ok()) {
            return status;
        }
        for (const OutputTensor& tensor : shards[i]) {
            placement.emplace_back(tensor.name, name);
        }
    }
    for (const auto& [tensor, file] : beside) {
        placement.emplace_back(tensor, file);
    }
    const json::Value index =
        json::Value::object({{"metadata", json::Value::object({{"total_size", total}})},
                             {"weight_map", json::Value::object(std::move(placement))}});
    return write_text_file(join_path(folder, "model.safetensors.index.json"), json::dump(index) + "\n");
}

Status write_text_file(const std::string& path, std::string_view text) {
    OutputFile file(path);
    file.write(text);
    return file.finish();
}

}  // namespace tessera

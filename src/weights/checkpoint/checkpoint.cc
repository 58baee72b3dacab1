#include "weights/checkpoint/checkpoint.h"

#include <algorithm>
#include <cstring>
#include <fmt/format.h>
#include <optional>

#include "base/clock.h"
#include "weights/checkpoint/name_map.h"
#include "weights/checkpoint/shard_list.h"

namespace tessera {
namespace {

constexpr size_t kTouchBytes = size_t{8} << 20;  // one item of the parallel read
constexpr TimeNs kProgressInterval = 200 * kNsPerMs;

struct TouchItem {
    size_t file = 0;
    size_t offset = 0;
    size_t count = 0;
};

// Counts finished bytes and calls `report` a few times a second, from whichever thread is there.
class ProgressMeter {
  public:
    ProgressMeter(const LoadProgress& report, int64_t total) : report_(report), total_(total) {}

    void add(int64_t bytes) {
        const int64_t done = done_.fetch_add(bytes) + bytes;
        TimeNs last = last_.load();
        const TimeNs now = now_ns();
        if (report_ && (done == total_ ||
                        (now - last >= kProgressInterval && last_.compare_exchange_strong(last, now)))) {
            report_(done, total_);
        }
    }

  private:
    const LoadProgress& report_;
    const int64_t total_;
    std::atomic<int64_t> done_{0};
    std::atomic<TimeNs> last_{0};
};

}  // namespace

Result<std::shared_ptr<Checkpoint>> Checkpoint::open(const std::string& folder, ThreadPool& pool) {
    const Result<ShardList> shards = list_shards(folder);
    if (!shards.ok()) {
        return shards.status();
    }
    auto checkpoint = std::make_shared<Checkpoint>();
    checkpoint->folder_ = folder;
    if (Status status = checkpoint->map_files(folder, shards->files); !status.ok()) {
        return status;
    }
    std::vector<std::optional<Result<std::vector<TensorEntry>>>> headers(checkpoint->files_.size());
    pool.parallel_for(static_cast<int64_t>(headers.size()), [&](int64_t i, int) {
        const File& file = checkpoint->files_[static_cast<size_t>(i)];
        headers[static_cast<size_t>(i)] = parse_safetensors(file.map.bytes(), file.path);
    });
    for (size_t i = 0; i < headers.size(); ++i) {
        if (!headers[i]->ok()) {
            return headers[i]->status();
        }
        if (Status status = checkpoint->add_tensors(i, headers[i]->take()); !status.ok()) {
            return status;
        }
    }
    for (const auto& [tensor, shard] : shards->placement) {
        const CheckpointTensor* found = checkpoint->find(canonical_name(tensor));
        if (found == nullptr || checkpoint->path(*found) != join_path(folder, shard)) {
            return data_loss(fmt::format("{}: places tensor {} in {}, whose header does not have it",
                                         shards->index_file, tensor, shard));
        }
    }
    checkpoint->sorted_.assign(checkpoint->by_name_.begin(), checkpoint->by_name_.end());
    std::ranges::sort(checkpoint->sorted_);
    return checkpoint;
}

Status Checkpoint::map_files(const std::string& folder, const std::vector<std::string>& names) {
    files_.reserve(names.size());
    for (const std::string& name : names) {
        std::string path = join_path(folder, name);
        Result<MappedFile> map = MappedFile::open(path);
        if (!map.ok()) {
            return map.status();
        }
        files_.push_back({std::move(path), map.take()});
    }
    return {};
}

Status Checkpoint::add_tensors(size_t file, std::vector<TensorEntry> entries) {
    for (TensorEntry& entry : entries) {
        std::string name = canonical_name(entry.name);
        const auto [place, inserted] = by_name_.emplace(std::move(name), nullptr);
        if (!inserted) {
            const CheckpointTensor& first = *place->second;
            return data_loss(fmt::format("{}: tensor {} is a duplicate: {} holds it already, as {}",
                                         files_[file].path, entry.name, path(first), first.entry.name));
        }
        tensor_bytes_ += static_cast<int64_t>(entry.bytes);
        const std::byte* data = aligned_data(entry, file);
        place->second = &tensors_.emplace_back(CheckpointTensor{std::move(entry), data, file, false});
    }
    return {};
}

// A header of odd length (old writers did not pad it) leaves elements at odd addresses: those tensors are
// copied.
const std::byte* Checkpoint::aligned_data(const TensorEntry& entry, size_t file) {
    const std::byte* data = files_[file].map.bytes().data() + entry.offset;
    const std::optional<DType> dtype = weight_dtype(entry.dtype);
    const auto alignment = static_cast<uintptr_t>(dtype ? dtype_size(*dtype) : 1);
    if (reinterpret_cast<uintptr_t>(data) % alignment == 0 || entry.bytes == 0) {
        return data;
    }
    std::byte* copy = allocate(entry.bytes);
    std::memcpy(copy, data, entry.bytes);
    return copy;
}

std::byte* Checkpoint::allocate(size_t bytes) {
    return owned_.emplace_back(bytes).data();
}

CheckpointTensor* Checkpoint::find(std::string_view canonical) {
    const auto place = by_name_.find(std::string(canonical));
    return place == by_name_.end() ? nullptr : place->second;
}

Status Checkpoint::touch(ThreadPool& pool, const LoadProgress& progress) const {
    std::vector<TouchItem> items;
    int64_t total = 0;
    for (size_t file = 0; file < files_.size(); ++file) {
        const size_t size = files_[file].map.bytes().size();
        total += static_cast<int64_t>(size);
        for (size_t offset = 0; offset < size; offset += kTouchBytes) {
            items.push_back({file, offset, std::min(kTouchBytes, size - offset)});
        }
    }
    ProgressMeter meter(progress, total);
    std::atomic<size_t> failed{items.size()};
    pool.parallel_for(static_cast<int64_t>(items.size()), [&](int64_t i, int) {
        const TouchItem& item = items[static_cast<size_t>(i)];
        if (!files_[item.file].map.populate(item.offset, item.count)) {
            failed.store(static_cast<size_t>(i));
        }
        meter.add(static_cast<int64_t>(item.count));
    });
    if (failed.load() < items.size()) {
        return data_loss(
            fmt::format("{}: cannot be read whole; it changed while it was loaded, or the disk failed",
                        files_[items[failed.load()].file].path));
    }
    return {};
}

void Checkpoint::drop_pages() const {
    for (const File& file : files_) {
        file.map.drop();
    }
}

}  // namespace tessera

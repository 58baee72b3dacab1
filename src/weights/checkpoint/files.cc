#include "weights/checkpoint/files.h"

#include <cerrno>
#include <cstring>
#include <fcntl.h>
#include <filesystem>
#include <fmt/format.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#include <utility>

namespace tessera {
namespace {

constexpr size_t kPageBytes = 4096;

// Closes its descriptor when it goes.
class Descriptor {
  public:
    explicit Descriptor(int number) : number_(number) {}
    ~Descriptor() {
        if (number_ >= 0) {
            ::close(number_);
        }
    }
    Descriptor(const Descriptor&) = delete;
    Descriptor& operator=(const Descriptor&) = delete;
    int number() const { return number_; }

  private:
    int number_;
};

std::string error_text() {
    return std::strerror(errno);
}

// The size of the regular file behind the descriptor.
Result<size_t> regular_file_size(const Descriptor& file, const std::string& path) {
    if (file.number() < 0) {
        const std::string message = fmt::format("{}: cannot be opened: {}", path, error_text());
        return errno == ENOENT ? not_found(message) : invalid_argument(message);
    }
    struct stat info = {};
    if (::fstat(file.number(), &info) != 0 || !S_ISREG(info.st_mode)) {
        return invalid_argument(fmt::format("{}: is no regular file", path));
    }
    return static_cast<size_t>(info.st_size);
}

// O_NONBLOCK: opening a pipe must not wait for a writer.
Descriptor open_to_read(const std::string& path) {
    return Descriptor(::open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK));
}

}  // namespace

std::string join_path(const std::string& folder, const std::string& name) {
    return folder.empty() || folder.back() == '/' ? folder + name : folder + "/" + name;
}

Status check_model_folder(const std::string& folder) {
    std::error_code error;
    return std::filesystem::is_directory(folder, error)
               ? Status()
               : not_found(fmt::format("{}: there is no such model folder", folder));
}

Result<std::string> read_text_file(const std::string& path, size_t bytes_max) {
    const Descriptor file = open_to_read(path);
    const Result<size_t> size = regular_file_size(file, path);
    if (!size.ok()) {
        return size.status();
    }
    if (*size > bytes_max) {
        return invalid_argument(
            fmt::format("{}: has {} bytes; at most {} are read of such a file", path, *size, bytes_max));
    }
    std::string text(*size, '\0');
    size_t done = 0;
    while (done < text.size()) {
        const ssize_t count = ::read(file.number(), text.data() + done, text.size() - done);
        if (count < 0 && errno == EINTR) {
            continue;
        }
        if (count <= 0) {
            return data_loss(
                fmt::format("{}: cannot be read: {}", path, count < 0 ? error_text() : "it became shorter"));
        }
        done += static_cast<size_t>(count);
    }
    return text;
}

Result<MappedFile> MappedFile::open(const std::string& path) {
    const Descriptor file = open_to_read(path);
    const Result<size_t> size = regular_file_size(file, path);
    if (!size.ok()) {
        return size.status();
    }
    if (*size == 0) {
        return MappedFile(nullptr, 0);
    }
    void* data = ::mmap(nullptr, *size, PROT_READ, MAP_PRIVATE, file.number(), 0);
    if (data == MAP_FAILED) {
        return invalid_argument(fmt::format("{}: cannot be mapped into memory: {}", path, error_text()));
    }
    return MappedFile(static_cast<const std::byte*>(data), *size);
}

MappedFile::MappedFile(MappedFile&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)), size_(std::exchange(other.size_, 0)) {}

MappedFile::~MappedFile() {
    if (data_ != nullptr) {
        ::munmap(const_cast<std::byte*>(data_), size_);
    }
}

bool MappedFile::populate(size_t offset, size_t count) const {
    const size_t begin = offset / kPageBytes * kPageBytes;
    std::byte* first = const_cast<std::byte*>(data_) + begin;
    const size_t length = offset + count - begin;
    if (::madvise(first, length, MADV_POPULATE_READ) == 0) {
        return true;
    }
    if (errno != EINVAL && errno != ENOSYS) {
        return false;
    }
    // A kernel older than 5.14: read one byte of each page.
    for (size_t at = 0; at < length; at += kPageBytes) {
        static_cast<void>(*static_cast<const volatile std::byte*>(first + at));
    }
    return true;
}

void MappedFile::drop() const {
    if (data_ != nullptr) {
        ::madvise(const_cast<std::byte*>(data_), size_, MADV_DONTNEED);
    }
}

}  // namespace tessera

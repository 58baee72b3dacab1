#include "weights/checkpoint/fingerprint.h"

#include <memory>
#include <openssl/evp.h>

#include "base/check.h"

namespace tessera {
namespace {

constexpr uint64_t kWholeBytes = 4096;  // tensors up to this size are hashed whole
constexpr uint64_t kSamples = 16;
constexpr uint64_t kSampleBytes = 64;

class Sha256 {
  public:
    Sha256() : context_(EVP_MD_CTX_new(), &EVP_MD_CTX_free) {
        check(context_ != nullptr && EVP_DigestInit_ex(context_.get(), EVP_sha256(), nullptr) == 1,
              "OpenSSL has no SHA-256");
    }
    void add(const void* data, size_t bytes) {
        check(EVP_DigestUpdate(context_.get(), data, bytes) == 1, "SHA-256 failed");
    }
    void add(uint64_t number) { add(&number, sizeof(number)); }
    // The length first, so that no two sequences of texts run together to the same bytes.
    void add(std::string_view text) {
        add(static_cast<uint64_t>(text.size()));
        add(text.data(), text.size());
    }
    std::array<uint8_t, 32> finish() {
        std::array<uint8_t, 32> digest{};
        check(EVP_DigestFinal_ex(context_.get(), digest.data(), nullptr) == 1, "SHA-256 failed");
        return digest;
    }

  private:
    std::unique_ptr<EVP_MD_CTX, decltype(&EVP_MD_CTX_free)> context_;
};

void add_bytes(Sha256& hash, const CheckpointTensor& tensor) {
    const uint64_t bytes = tensor.entry.bytes;
    if (bytes <= kWholeBytes) {
        hash.add(tensor.data, bytes);
        return;
    }
    // The first sample is the tensor's beginning, the last its end.
    for (uint64_t i = 0; i < kSamples; ++i) {
        const uint64_t span = bytes - kSampleBytes;
        const uint64_t offset = span / (kSamples - 1) * i + span % (kSamples - 1) * i / (kSamples - 1);
        hash.add(tensor.data + offset, kSampleBytes);
    }
}

}  // namespace

std::array<uint8_t, 32> checkpoint_fingerprint(const Checkpoint& checkpoint, std::string_view config_text) {
    Sha256 hash;
    hash.add(config_text);
    for (const auto& [name, tensor] : checkpoint.sorted()) {
        hash.add(name);
        hash.add(tensor->entry.dtype);
        hash.add(static_cast<uint64_t>(tensor->entry.shape.size()));
        for (int64_t extent : tensor->entry.shape) {
            hash.add(static_cast<uint64_t>(extent));
        }
        add_bytes(hash, *tensor);
    }
    return hash.finish();
}

}  // namespace tessera

// The two hashes of the key chain. Their input is fixed byte by byte (docs/formats/kv_page.md): keys are
// compared between processes and between machines of any byte order.
#include <algorithm>
#include <bit>
#include <openssl/evp.h>
#include <string>
#include <type_traits>

#include "base/check.h"
#include "cache/kv_cache.h"

namespace tessera {
namespace {

constexpr std::string_view kRootTag = "tessera kv root";

template <typename T>
void append_little_endian(std::string& out, T value) {
    static_assert(std::is_integral_v<T>);
    auto bits = static_cast<std::make_unsigned_t<T>>(value);
    for (size_t byte = 0; byte < sizeof(T); ++byte) {
        out.push_back(static_cast<char>(static_cast<uint64_t>(bits) >> (8 * byte) & 0xFF));
    }
}

PageKey hash(std::string_view bytes) {
    std::array<unsigned char, 32> digest{};
    unsigned int size = 0;
    const int ok = EVP_Digest(bytes.data(), bytes.size(), digest.data(), &size, EVP_sha256(), nullptr);
    check(ok == 1 && size == digest.size(), "SHA-256 failed");
    PageKey key;
    std::copy_n(digest.begin(), key.bytes.size(), key.bytes.begin());
    return key;
}

}  // namespace

PageKey root_key(const CacheIdentity& identity, std::string_view salt) {
    std::string bytes(kRootTag);
    append_little_endian(bytes, kPageFormatVersion);
    for (uint8_t byte : identity.weights_fingerprint) {
        append_little_endian(bytes, byte);
    }
    const PageFormat& format = identity.format;
    for (int64_t field : {format.layers, format.kv_heads, format.head_dim, format.hidden_size}) {
        append_little_endian(bytes, field);
    }
    append_little_endian(bytes, static_cast<uint8_t>(format.kv_dtype));
    append_little_endian(bytes, static_cast<uint8_t>(format.scale_kind));
    append_little_endian(bytes, static_cast<uint8_t>(format.hadamard));
    append_little_endian(bytes, format.aux_bytes);
    append_little_endian(bytes, static_cast<uint64_t>(identity.kv_scales.size()));
    for (float scale : identity.kv_scales) {
        append_little_endian(bytes, std::bit_cast<uint32_t>(scale));
    }
    append_little_endian(bytes, identity.tp_size);
    append_little_endian(bytes, identity.tp_rank);
    append_little_endian(bytes, static_cast<uint8_t>(identity.deterministic));
    append_little_endian(bytes, static_cast<uint8_t>(identity.quantised_communication));
    append_little_endian(bytes, static_cast<uint64_t>(salt.size()));
    bytes.append(salt);
    return hash(bytes);
}

PageKey next_key(const PageKey& previous, std::span<const TokenId> tokens) {
    check(static_cast<int64_t>(tokens.size()) == kPageTokens, "a page key covers 64 tokens");
    std::string bytes;
    bytes.reserve(previous.bytes.size() + tokens.size_bytes());
    for (uint8_t byte : previous.bytes) {
        append_little_endian(bytes, byte);
    }
    for (TokenId token : tokens) {
        append_little_endian(bytes, token);
    }
    return hash(bytes);
}

}  // namespace tessera

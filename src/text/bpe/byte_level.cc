#include "text/bpe/byte_level.h"

#include <array>

#include "base/utf8.h"

namespace tessera::bpe {
namespace {

constexpr char32_t kFirstStandIn = 0x100;  // bytes that are not printable map to U+0100 and on, in byte order

constexpr bool stands_for_itself(unsigned byte) {
    return (byte >= 0x21 && byte <= 0x7E) || (byte >= 0xA1 && byte <= 0xAC) || byte >= 0xAE;
}

constexpr std::array<char32_t, 256> make_alphabet() {
    std::array<char32_t, 256> alphabet{};
    char32_t next = kFirstStandIn;
    for (unsigned byte = 0; byte < 256; ++byte) {
        alphabet[byte] = stands_for_itself(byte) ? static_cast<char32_t>(byte) : next++;
    }
    return alphabet;
}

constexpr std::array<char32_t, 256> kAlphabet = make_alphabet();
constexpr size_t kCharEnd = 0x144;  // one past the largest code point of the alphabet

constexpr std::array<int16_t, kCharEnd> make_inverse() {
    std::array<int16_t, kCharEnd> inverse{};
    inverse.fill(-1);
    for (size_t byte = 0; byte < 256; ++byte) {
        inverse[kAlphabet[byte]] = static_cast<int16_t>(byte);
    }
    return inverse;
}

constexpr std::array<int16_t, kCharEnd> kInverse = make_inverse();

}  // namespace

char32_t byte_to_char(unsigned char byte) {
    return kAlphabet[byte];
}

std::optional<std::string> bytes_of_chars(std::string_view text) {
    std::string bytes;
    bytes.reserve(text.size());
    while (!text.empty()) {
        const Utf8Step step = utf8_next(text);
        if (!step.valid || step.code_point >= kCharEnd || kInverse[step.code_point] < 0) {
            return std::nullopt;
        }
        bytes += static_cast<char>(kInverse[step.code_point]);
        text.remove_prefix(step.length);
    }
    return bytes;
}

}  // namespace tessera::bpe

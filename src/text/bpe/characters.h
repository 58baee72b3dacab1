// Two character classes that the tokenizers library uses and that PCRE2 spells otherwise.
#pragma once

#include <string_view>

namespace tessera::bpe {

// Unicode's White_Space, as the inside of a regex class. PCRE2's own \s also takes U+180E.
inline constexpr std::string_view kWhiteSpaceClass =
    R"(\x{9}-\x{D}\x{20}\x{85}\x{A0}\x{1680}\x{2000}-\x{200A}\x{2028}\x{2029}\x{202F}\x{205F}\x{3000})";
// Word characters, as the inside of a regex class (PCRE2's \w lacks marks and connectors).
inline constexpr std::string_view kWordClass = R"(\p{Alphabetic}\p{M}\p{Nd}\p{Pc})";

constexpr bool is_white_space(char32_t c) {
    return (c >= 0x9 && c <= 0xD) || c == 0x20 || c == 0x85 || c == 0xA0 || c == 0x1680 ||
           (c >= 0x2000 && c <= 0x200A) || c == 0x2028 || c == 0x2029 || c == 0x202F || c == 0x205F ||
           c == 0x3000;
}

}  // namespace tessera::bpe

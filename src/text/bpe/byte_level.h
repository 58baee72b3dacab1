// The byte alphabet of byte-level BPE: tokenizer.json writes each byte as one printable code point.
#pragma once

#include <optional>
#include <string>
#include <string_view>

namespace tessera::bpe {

// The code point that stands for a byte.
char32_t byte_to_char(unsigned char byte);
// The bytes that text spells, or none when a character of it stands for no byte.
std::optional<std::string> bytes_of_chars(std::string_view text);

}  // namespace tessera::bpe

// UTF-8, one step at a time, as the Unicode standard splits invalid input: one U+FFFD for each maximal
// subpart of an ill-formed sequence.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>

namespace tessera {

inline constexpr std::string_view kReplacementCharacter = "\xEF\xBF\xBD";

struct Utf8Step {
    size_t length = 0;        // bytes to skip, at least 1
    bool valid = false;       // a whole well-formed code point
    bool incomplete = false;  // the text ends inside a sequence that could still become well-formed
    char32_t code_point = 0;  // when valid
};

// The first step of text. REQUIRES: !text.empty()
Utf8Step utf8_next(std::string_view text);
bool utf8_valid(std::string_view text);
void utf8_append(std::string& out, char32_t code_point);
// The text with each maximal invalid subpart replaced by U+FFFD.
std::string utf8_replace_invalid(std::string_view text);
// For a terminal, which obeys control characters: all but tab and line feed become <U+001B> and the like, and
// invalid subparts U+FFFD.
std::string utf8_for_terminal(std::string_view text);
// How many bytes at the end of text begin a code point that is not whole yet (0 to 3).
size_t utf8_incomplete_tail(std::string_view text);

}  // namespace tessera

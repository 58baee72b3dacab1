#include "base/utf8.h"

#include <algorithm>
#include <fmt/format.h>

namespace tessera {
namespace {

struct Lead {
    int continuation;         // bytes that follow, 0 = not a lead byte of a multi-byte sequence
    unsigned char low, high;  // allowed range of the second byte (Unicode table 3-7)
};

Lead lead_of(unsigned char byte) {
    if (byte >= 0xC2 && byte <= 0xDF) {
        return {1, 0x80, 0xBF};
    }
    if (byte >= 0xE0 && byte <= 0xEF) {
        const auto low = static_cast<unsigned char>(byte == 0xE0 ? 0xA0 : 0x80);
        const auto high = static_cast<unsigned char>(byte == 0xED ? 0x9F : 0xBF);
        return {2, low, high};
    }
    if (byte >= 0xF0 && byte <= 0xF4) {
        const auto low = static_cast<unsigned char>(byte == 0xF0 ? 0x90 : 0x80);
        const auto high = static_cast<unsigned char>(byte == 0xF4 ? 0x8F : 0xBF);
        return {3, low, high};
    }
    return {0, 0, 0};
}

}  // namespace

Utf8Step utf8_next(std::string_view text) {
    const auto first = static_cast<unsigned char>(text[0]);
    if (first < 0x80) {
        return {1, true, false, first};
    }
    const Lead lead = lead_of(first);
    if (lead.continuation == 0) {
        return {1, false, false, 0};
    }
    char32_t code_point = first & (0x3Fu >> lead.continuation);
    for (size_t i = 1; i <= static_cast<size_t>(lead.continuation); ++i) {
        if (i >= text.size()) {
            return {i, false, true, 0};
        }
        const auto byte = static_cast<unsigned char>(text[i]);
        const unsigned char low = i == 1 ? lead.low : 0x80;
        const unsigned char high = i == 1 ? lead.high : 0xBF;
        if (byte < low || byte > high) {
            return {i, false, false, 0};
        }
        code_point = (code_point << 6) | (byte & 0x3Fu);
    }
    return {static_cast<size_t>(lead.continuation) + 1, true, false, code_point};
}

bool utf8_valid(std::string_view text) {
    while (!text.empty()) {
        const Utf8Step step = utf8_next(text);
        if (!step.valid) {
            return false;
        }
        text.remove_prefix(step.length);
    }
    return true;
}

void utf8_append(std::string& out, char32_t c) {
    if (c < 0x80) {
        out += static_cast<char>(c);
    } else if (c < 0x800) {
        out += static_cast<char>(0xC0 | (c >> 6));
        out += static_cast<char>(0x80 | (c & 0x3F));
    } else if (c < 0x10000) {
        out += static_cast<char>(0xE0 | (c >> 12));
        out += static_cast<char>(0x80 | ((c >> 6) & 0x3F));
        out += static_cast<char>(0x80 | (c & 0x3F));
    } else {
        out += static_cast<char>(0xF0 | (c >> 18));
        out += static_cast<char>(0x80 | ((c >> 12) & 0x3F));
        out += static_cast<char>(0x80 | ((c >> 6) & 0x3F));
        out += static_cast<char>(0x80 | (c & 0x3F));
    }
}

std::string utf8_replace_invalid(std::string_view text) {
    std::string out;
    out.reserve(text.size());
    while (!text.empty()) {
        const Utf8Step step = utf8_next(text);
        out += step.valid ? text.substr(0, step.length) : kReplacementCharacter;
        text.remove_prefix(step.length);
    }
    return out;
}

std::string utf8_for_terminal(std::string_view text) {
    std::string out;
    out.reserve(text.size());
    while (!text.empty()) {
        const Utf8Step step = utf8_next(text);
        const char32_t c = step.code_point;
        const bool control = (c < 0x20 && c != '\t' && c != '\n') || (c >= 0x7F && c < 0xA0);
        if (!step.valid) {
            out += kReplacementCharacter;
        } else if (control) {
            out += fmt::format("<U+{:04X}>", static_cast<uint32_t>(c));
        } else {
            out += text.substr(0, step.length);
        }
        text.remove_prefix(step.length);
    }
    return out;
}

size_t utf8_incomplete_tail(std::string_view text) {
    const size_t longest = std::min<size_t>(3, text.size());
    for (size_t tail = longest; tail >= 1; --tail) {
        const Utf8Step step = utf8_next(text.substr(text.size() - tail));
        if (step.incomplete && step.length == tail) {
            return tail;
        }
    }
    return 0;
}

}  // namespace tessera

// Finds tags in a text that arrives in pieces, and keeps back what may be the beginning of one.
#pragma once

#include <span>
#include <string_view>

namespace tessera {

struct TagHit {
    size_t text = 0;    // bytes before the tag, or, without a tag, bytes that cannot belong to one
    size_t length = 0;  // of the tag
    int tag = -1;       // index into the tags; -1: no whole tag in the text
};

// The first of the tags in text. REQUIRES: every tag begins with '<', and none is the beginning of another.
inline TagHit find_tag(std::string_view text, std::span<const std::string_view> tags) {
    for (size_t at = text.find('<'); at != std::string_view::npos; at = text.find('<', at + 1)) {
        const std::string_view rest = text.substr(at);
        for (size_t i = 0; i < tags.size(); ++i) {
            if (rest.starts_with(tags[i])) {
                return {at, tags[i].size(), static_cast<int>(i)};
            }
            if (tags[i].starts_with(rest)) {
                return {at, 0, -1};
            }
        }
    }
    return {text.size(), 0, -1};
}

}  // namespace tessera

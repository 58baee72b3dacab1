#include "text/bpe/added_tokens.h"

#include <algorithm>
#include <cstring>
#include <fmt/format.h>

#include "base/utf8.h"
#include "text/bpe/characters.h"

namespace tessera::bpe {
namespace {

// The last character of text. REQUIRES: text is valid UTF-8 and not empty.
std::string_view last_character(std::string_view text) {
    size_t at = text.size() - 1;
    while (at > 0 && (static_cast<unsigned char>(text[at]) & 0xC0) == 0x80) {
        --at;
    }
    return text.substr(at);
}

size_t white_space_at_start(std::string_view text) {
    size_t length = 0;
    while (length < text.size()) {
        const Utf8Step step = utf8_next(text.substr(length));
        if (!is_white_space(step.code_point)) {
            break;
        }
        length += step.length;
    }
    return length;
}

size_t without_white_space_at_end(std::string_view text) {
    while (!text.empty() && is_white_space(utf8_next(last_character(text)).code_point)) {
        text.remove_suffix(last_character(text).size());
    }
    return text.size();
}

}  // namespace

Result<AddedTokenMatcher> AddedTokenMatcher::build(std::vector<const AddedToken*> tokens) {
    // As the tokenizers library, which counts the joiners among word characters here.
    Result<Regex> word = Regex::compile(fmt::format("[{}\\x{{200C}}\\x{{200D}}]", kWordClass));
    if (!word.ok()) {
        return word.status();
    }
    AddedTokenMatcher made(word.take());
    made.tokens_ = std::move(tokens);
    made.nodes_.emplace_back();
    for (size_t i = 0; i < made.tokens_.size(); ++i) {
        const std::string& content = made.tokens_[i]->content;
        made.insert(content, static_cast<int32_t>(i));
        made.starts_[static_cast<unsigned char>(content[0])] = true;
    }
    if (std::count(made.starts_.begin(), made.starts_.end(), true) == 1) {
        made.only_start_ = static_cast<int>(std::find(made.starts_.begin(), made.starts_.end(), true) -
                                            made.starts_.begin());
    }
    return made;
}

void AddedTokenMatcher::insert(std::string_view content, int32_t token) {
    int32_t node = 0;
    for (const char byte : content) {
        int32_t next = child(node, byte);
        if (next < 0) {
            next = static_cast<int32_t>(nodes_.size());
            nodes_.push_back(
                {.first_child = -1, .next_sibling = nodes_[node].first_child, .token = -1, .byte = byte});
            nodes_[node].first_child = next;
        }
        node = next;
    }
    nodes_[node].token = token;
}

int32_t AddedTokenMatcher::child(int32_t node, char byte) const {
    int32_t at = nodes_[node].first_child;
    while (at >= 0 && nodes_[at].byte != byte) {
        at = nodes_[at].next_sibling;
    }
    return at;
}

size_t AddedTokenMatcher::next_candidate(std::string_view text, size_t from) const {
    if (only_start_ >= 0) {
        const void* found = std::memchr(text.data() + from, only_start_, text.size() - from);
        return found == nullptr ? text.size()
                                : static_cast<size_t>(static_cast<const char*>(found) - text.data());
    }
    while (from < text.size() && !starts_[static_cast<unsigned char>(text[from])]) {
        ++from;
    }
    return from;
}

bool AddedTokenMatcher::find(std::string_view text, size_t from, Match& match) const {
    for (size_t begin = next_candidate(text, from); begin < text.size();
         begin = next_candidate(text, begin + 1)) {
        match.token = nullptr;
        int32_t node = 0;
        for (size_t at = begin; at < text.size(); ++at) {
            node = child(node, text[at]);
            if (node < 0) {
                break;
            }
            if (nodes_[node].token >= 0) {
                match = {begin, at + 1, tokens_[nodes_[node].token]};
            }
        }
        if (match.token != nullptr) {
            return true;
        }
    }
    return false;
}

bool AddedTokenMatcher::inside_word(std::string_view text, const Match& match, RegexScratch& scratch) const {
    Span found;
    const auto is_word = [&](std::string_view character) {
        return word_.search(character, 0, scratch, found) == Regex::Outcome::kMatch;
    };
    if (match.begin > 0 && is_word(last_character(text.substr(0, match.begin)))) {
        return true;
    }
    const std::string_view after = text.substr(match.end);
    return !after.empty() && is_word(after.substr(0, utf8_next(after).length));
}

void AddedTokenMatcher::split(std::string_view text, RegexScratch& scratch, std::vector<Part>& parts) const {
    size_t done = 0;
    Match match;
    for (size_t from = 0; from < text.size() && !tokens_.empty() && find(text, from, match);) {
        from = match.end;
        if (match.token->single_word && inside_word(text, match, scratch)) {
            continue;
        }
        if (match.token->lstrip) {
            match.begin = std::max(without_white_space_at_end(text.substr(0, match.begin)), done);
        }
        if (match.token->rstrip) {
            match.end += white_space_at_start(text.substr(match.end));
        }
        if (done < match.begin) {
            parts.push_back({nullptr, {done, match.begin}});
        }
        parts.push_back({match.token, {match.begin, match.end}});
        done = match.end;
    }
    if (done < text.size()) {
        parts.push_back({nullptr, {done, text.size()}});
    }
}

}  // namespace tessera::bpe

#include "text/detokenizer.h"

#include "base/utf8.h"

namespace tessera {

std::string Detokenizer::push(TokenId id) {
    if (skip_special_ && tokenizer_.is_special(id)) {
        return {};
    }
    held_ += tokenizer_.token_bytes(id);
    const size_t whole = held_.size() - utf8_incomplete_tail(held_);
    std::string out = utf8_replace_invalid(std::string_view(held_).substr(0, whole));
    held_.erase(0, whole);
    return out;
}

std::string Detokenizer::flush() {
    std::string out = utf8_replace_invalid(held_);
    held_.clear();
    return out;
}

}  // namespace tessera

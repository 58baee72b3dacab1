// Added tokens: texts that become one token each, cut out before the rest is split. Leftmost-longest, in one
// pass.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "text/bpe/regex.h"
#include "types/model_config.h"

namespace tessera::bpe {

struct AddedToken {
    TokenId id = -1;
    std::string content;
    bool special = false;      // left out by decode(skip_special)
    bool normalized = false;   // looked for in the normalised text, not in the text as given
    bool lstrip = false;       // takes the white space before it along
    bool rstrip = false;       // and after it
    bool single_word = false;  // not inside a word
};

// A trie over the contents. Immutable once built; the added tokens that it was built from must outlive it.
class AddedTokenMatcher {
  public:
    static Result<AddedTokenMatcher> build(std::vector<const AddedToken*> tokens);
    bool empty() const { return tokens_.empty(); }

    struct Part {
        const AddedToken* token = nullptr;  // null: the text between tokens
        Span span;
    };
    // Cuts the whole text into parts without a gap; no part is empty. The parts are appended.
    void split(std::string_view text, RegexScratch& scratch, std::vector<Part>& parts) const;

  private:
    struct Node {
        int32_t first_child = -1;
        int32_t next_sibling = -1;
        int32_t token = -1;  // index into tokens_
        char byte = 0;
    };
    struct Match {
        size_t begin = 0, end = 0;
        const AddedToken* token = nullptr;
    };

    explicit AddedTokenMatcher(Regex word) : word_(std::move(word)) {}
    void insert(std::string_view content, int32_t token);
    int32_t child(int32_t node, char byte) const;
    size_t next_candidate(std::string_view text, size_t from) const;
    bool find(std::string_view text, size_t from, Match& match) const;
    bool inside_word(std::string_view text, const Match& match, RegexScratch& scratch) const;

    std::vector<const AddedToken*> tokens_;
    std::vector<Node> nodes_;            // [0] is the root
    std::array<bool, 256> starts_ = {};  // bytes that begin a token
    int only_start_ = -1;                // the one such byte, when there is just one
    Regex word_;                         // one word character
};

}  // namespace tessera::bpe

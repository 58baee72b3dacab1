// Incremental detokenizer and stop strings: tokens -> text that never ends inside a code point and never
// shows a stop string's beginning before it is known to be none.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "text/tokenizer.h"

namespace tessera {

// The concatenation of everything returned equals Tokenizer::decode of the same ids.
class Detokenizer {
  public:
    explicit Detokenizer(const Tokenizer& tokenizer, bool skip_special = true)
        : tokenizer_(tokenizer), skip_special_(skip_special) {}
    std::string push(TokenId id);
    std::string flush();  // what an incomplete code point leaves, as U+FFFD

  private:
    const Tokenizer& tokenizer_;
    const bool skip_special_;
    std::string held_;  // 0 to 3 bytes of an incomplete code point
};

// Finds the earliest end of any stop string in a growing text; of several that end there the longest, so that
// nothing of it is shown. Linear in the text. Empty stop strings are ignored.
class StopMatcher {
  public:
    explicit StopMatcher(std::vector<std::string> stops, bool include_stop = false);
    struct Output {
        std::string text;      // safe to show
        bool stopped = false;  // a stop string was found; later pushes return nothing
        std::string found;     // it, from the push that found it
    };
    Output push(std::string_view text);
    std::string flush();  // what was held back

  private:
    // One state for each beginning of a stop string (an Aho-Corasick automaton).
    struct State {
        std::vector<std::pair<char, int32_t>> next;
        int32_t fallback = 0;  // the longest proper suffix that is a state
        int32_t depth = 0;     // bytes of the beginning
        int32_t match = 0;     // bytes of the longest stop string that ends here; 0: none
    };

    int32_t find(int32_t state, char byte) const;
    int32_t step(int32_t state, char byte) const;
    void link();

    bool include_stop_;
    std::vector<State> states_;
    int32_t state_ = 0;
    std::string held_;  // the beginning of a stop string that the text ends in
    bool stopped_ = false;
};

}  // namespace tessera

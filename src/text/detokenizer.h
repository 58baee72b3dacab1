// Incremental detokenizer and stop strings: tokens -> text that never ends inside a code point and never shows a
// stop string's beginning before it is known to be none.
#pragma once

#include <memory>
#include <string>
#include <string_view>
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

// Finds the earliest end of any stop string in a growing text. Linear in the text.
class StopMatcher {
  public:
    explicit StopMatcher(std::vector<std::string> stops, bool include_stop = false);
    struct Output {
        std::string text;      // safe to show
        bool stopped = false;  // a stop string was found; later pushes return nothing
    };
    Output push(std::string_view text);
    std::string flush();  // what was held back

  private:
    std::vector<std::string> stops_;
    bool include_stop_;
    std::string held_;
    bool stopped_ = false;
};

}  // namespace tessera

// The pre_tokenizer of tokenizer.json: cuts a text into the pieces that byte-pair encoding never merges
// across.
#pragma once

#include <deque>
#include <string>
#include <string_view>
#include <vector>

#include "base/json.h"
#include "base/status.h"
#include "text/bpe/regex.h"

namespace tessera::bpe {

// What happens to the matches of a Split.
enum class SplitBehavior { kIsolated, kRemoved, kMergedWithPrevious, kMergedWithNext, kContiguous };

// Working memory of split(). `made` keeps the pieces alive that are no part of the caller's text.
struct SplitScratch {
    RegexScratch regex;
    std::vector<std::string_view> pieces, next;
    std::vector<std::pair<Span, bool>> matches;  // and whether it is a match or what lies between
    std::deque<std::string> made;
};

// Splits, in order, and then ByteLevel. Immutable.
class PreTokenizer {
  public:
    static Result<PreTokenizer> parse(const json::Value& spec);
    // Leaves the pieces of text in scratch.pieces; none is empty. An error when a regex runs over its limits.
    // REQUIRES: text is valid UTF-8.
    Status split(std::string_view text, SplitScratch& scratch) const;

  private:
    struct Split {
        Regex regex;
        SplitBehavior behavior = SplitBehavior::kIsolated;
        bool invert = false;
    };

    Status add(const json::Value& spec, int depth);
    Status add_split(const json::Value& spec);
    Status add_byte_level(const json::Value& spec);
    static Status run(const Split& split, std::string_view piece, SplitScratch& scratch);
    void add_prefix_spaces(SplitScratch& scratch) const;

    std::vector<Split> splits_;
    bool byte_level_ = false;
    bool prefix_space_ = false;
    size_t prefix_before_ = 0;  // the first split that sees the prefix space
};

}  // namespace tessera::bpe

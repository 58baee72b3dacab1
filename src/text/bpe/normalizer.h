// The normalizer of tokenizer.json: what is done to a text before it is split.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/json.h"
#include "base/status.h"
#include "text/bpe/regex.h"

namespace tessera::bpe {

// NFC, NFD, NFKC, NFKD, Lowercase, Strip, Prepend, Replace and Sequence of them. Immutable.
class Normalizer {
  public:
    // null gives the empty normalizer; an unknown type is an error that names it.
    static Result<Normalizer> parse(const json::Value& spec);
    bool empty() const { return steps_.empty(); }
    // REQUIRES: text is valid UTF-8. An error when a regex runs over its limits.
    Result<std::string> apply(std::string_view text, RegexScratch& scratch) const;

  private:
    enum class Kind { kNfc, kNfd, kNfkc, kNfkd, kLowercase, kStrip, kPrepend, kReplace };
    struct Step {
        Kind kind;
        std::string content = {};          // of kPrepend and kReplace
        std::optional<Regex> regex = {};   // of kReplace
        bool left = false, right = false;  // of kStrip
    };

    Status add(const json::Value& spec, int depth);
    Status add_replace(const json::Value& spec);
    static Result<std::string> run(const Step& step, std::string text, RegexScratch& scratch);

    std::vector<Step> steps_;
};

}  // namespace tessera::bpe

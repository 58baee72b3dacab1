// Regular expressions as tokenizer.json spells them (Oniguruma), run by PCRE2 with its JIT, UTF and UCP.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "base/status.h"

namespace tessera::bpe {

// What one search needs beside the pattern. One for a thread at a time; shared by all patterns.
class RegexScratch {
  public:
    RegexScratch();
    ~RegexScratch();
    RegexScratch(RegexScratch&&) noexcept;

  private:
    friend class Regex;
    struct Impl;
    std::unique_ptr<Impl> impl_;
};

struct Span {
    size_t begin = 0;
    size_t end = 0;
    bool empty() const { return begin == end; }
    bool operator==(const Span&) const = default;
};

// Immutable; any number of threads may search at once, each with its own scratch.
class Regex {
  public:
    // An error names the pattern and what in it is not supported.
    static Result<Regex> compile(std::string_view pattern);
    // Matches the text itself.
    static Result<Regex> literal(std::string_view text);

    enum class Outcome { kMatch, kNone, kLimit };
    // The first match that begins at or after `from`. REQUIRES: subject is valid UTF-8, from is a character's
    // start.
    Outcome search(std::string_view subject, size_t from, RegexScratch& scratch, Span& match) const;

  private:
    struct Code;
    Regex();
    static Result<Regex> build(std::string_view shown, const std::string& pattern, bool literal);

    std::shared_ptr<const Code> code_;
};

// The matches of a whole subject, in order, as Oniguruma's iteration gives them: an empty match directly
// after the last one is passed over.
class RegexIterator {
  public:
    RegexIterator(const Regex& regex, std::string_view subject, RegexScratch& scratch)
        : regex_(regex), subject_(subject), scratch_(scratch) {}
    Regex::Outcome next(Span& match);

  private:
    const Regex& regex_;
    const std::string_view subject_;
    RegexScratch& scratch_;
    size_t from_ = 0;
    std::optional<size_t> last_end_;
};

// The pattern in PCRE2's spelling: \s, \w, \h and word borders written out as Oniguruma means them. An error
// for what the two engines read differently.
Result<std::string> to_pcre2_pattern(std::string_view pattern);

}  // namespace tessera::bpe

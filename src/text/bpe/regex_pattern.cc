// From Oniguruma's spelling of a pattern to PCRE2's. Most of it is the same; what differs is written out, and
// what cannot be is refused by name.
#define PCRE2_CODE_UNIT_WIDTH 8
#include <fmt/format.h>
#include <pcre2.h>

#include "text/bpe/characters.h"
#include "text/bpe/regex.h"

namespace tessera::bpe {
namespace {

constexpr std::string_view kHexClass = "0-9A-Fa-f";
constexpr std::string_view kPosixSpace = "[:space:]";

// PCRE2 takes \p{Han} as Script_Extensions, Oniguruma as Script.
bool is_script_name(std::string_view name) {
    const std::string probe = fmt::format("\\p{{sc:{}}}", name);
    int error = 0;
    PCRE2_SIZE offset = 0;
    pcre2_code* code = pcre2_compile(reinterpret_cast<PCRE2_SPTR>(probe.data()), probe.size(), PCRE2_UTF,
                                     &error, &offset, nullptr);
    pcre2_code_free(code);
    return code != nullptr;
}

class Translator {
  public:
    explicit Translator(std::string_view pattern) : pattern_(pattern) {}

    Result<std::string> run() {
        while (at_ < pattern_.size() && status_.ok()) {
            const char c = pattern_[at_];
            if (c == '\\') {
                escape();
            } else if (c == '[') {
                character_class();
            } else {
                if (c == '(') {
                    check_inline_options();
                }
                out_ += c;
                ++at_;
            }
        }
        if (!status_.ok()) {
            return status_;
        }
        return std::move(out_);
    }

  private:
    void refuse(std::string_view what) {
        status_ =
            unimplemented(fmt::format("the regex {:?} uses {}, which is not supported", pattern_, what));
    }

    bool looking_at(std::string_view text) const { return pattern_.substr(at_).starts_with(text); }

    // (?m) is PCRE2's (?s); a file that needs it would silently split otherwise.
    void check_inline_options() {
        size_t end = at_ + 1;
        if (end >= pattern_.size() || pattern_[end] != '?') {
            return;
        }
        for (++end; end < pattern_.size() &&
                    (std::isalpha(static_cast<unsigned char>(pattern_[end])) != 0 || pattern_[end] == '-');
             ++end) {
            if (pattern_[end] == 'm') {
                refuse("the inline option m");
            }
        }
    }

    // A property \p{...}: copied, scripts named as such.
    void property() {
        const size_t open = at_ + 2;
        const size_t close = pattern_.find('}', open);
        if (open >= pattern_.size() || pattern_[open] != '{' || close == std::string_view::npos) {
            copy(2);
            return;
        }
        std::string_view name = pattern_.substr(open + 1, close - open - 1);
        out_ += pattern_.substr(at_, 3);
        if (name.starts_with('^')) {
            out_ += '^';
            name.remove_prefix(1);
        }
        out_ += is_script_name(name) ? fmt::format("sc:{}}}", name) : fmt::format("{}}}", name);
        at_ = close + 1;
    }

    void copy(size_t count) {
        out_ += pattern_.substr(at_, count);
        at_ += count;
    }

    void put(std::string text) {
        out_ += text;
        at_ += 2;
    }

    void escape() {
        const char kind = at_ + 1 < pattern_.size() ? pattern_[at_ + 1] : '\0';
        switch (kind) {
            case 's':
                return put(fmt::format("[{}]", kWhiteSpaceClass));
            case 'S':
                return put(fmt::format("[^{}]", kWhiteSpaceClass));
            case 'w':
                return put(fmt::format("[{}]", kWordClass));
            case 'W':
                return put(fmt::format("[^{}]", kWordClass));
            case 'h':
                return put(fmt::format("[{}]", kHexClass));
            case 'H':
                return put(fmt::format("[^{}]", kHexClass));
            case 'b':
                return put(fmt::format("(?:(?<=[{0}])(?![{0}])|(?<![{0}])(?=[{0}]))", kWordClass));
            case 'B':
                return put(fmt::format("(?:(?<=[{0}])(?=[{0}])|(?<![{0}])(?![{0}]))", kWordClass));
            case 'p':
            case 'P':
                return property();
            default:
                return copy(2);
        }
    }

    void character_class() {
        copy(1);
        if (looking_at("^")) {
            copy(1);
        }
        if (looking_at("]")) {  // a literal bracket in the first place
            out_ += '\\';
            copy(1);
        }
        while (status_.ok()) {
            if (at_ >= pattern_.size()) {
                return refuse("a class without its end");
            }
            if (pattern_[at_] == ']') {
                return copy(1);
            }
            class_member();
        }
    }

    void class_member() {
        if (looking_at(kPosixSpace)) {
            out_ += kWhiteSpaceClass;
            at_ += kPosixSpace.size();
        } else if (looking_at("[")) {
            refuse("a class inside a class");
        } else if (looking_at("&&")) {
            refuse("an intersection of classes");
        } else if (looking_at("\\")) {
            class_escape();
        } else {
            copy(1);
        }
    }

    void class_escape() {
        const char kind = at_ + 1 < pattern_.size() ? pattern_[at_ + 1] : '\0';
        switch (kind) {
            case 's':
                return put(std::string(kWhiteSpaceClass));
            case 'S':  // PCRE2 leaves out one character more
                return put(R"(\S\x{180E})");
            case 'w':
                return put(std::string(kWordClass));
            case 'h':
                return put(std::string(kHexClass));
            case 'W':
            case 'H':
                return refuse(fmt::format("\\{} inside a class", kind));
            case 'p':
            case 'P':
                return property();
            default:
                return copy(2);
        }
    }

    const std::string_view pattern_;
    size_t at_ = 0;
    std::string out_;
    Status status_;
};

}  // namespace

Result<std::string> to_pcre2_pattern(std::string_view pattern) {
    return Translator(pattern).run();
}

}  // namespace tessera::bpe

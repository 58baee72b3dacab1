#include "text/bpe/regex.h"

#define PCRE2_CODE_UNIT_WIDTH 8
#include <fmt/format.h>
#include <pcre2.h>

#include "base/utf8.h"

namespace tessera::bpe {
namespace {

// A search gives up past these: a pattern that backtracks without end must cost an error, not a thread.
constexpr uint32_t kMatchLimit = 50'000'000;
constexpr uint32_t kDepthLimit = 1'000'000;
constexpr uint32_t kHeapLimitKib = 64 * 1024;

struct FreeCode {
    void operator()(pcre2_code* code) const { pcre2_code_free(code); }
};
struct FreeMatchData {
    void operator()(pcre2_match_data* data) const { pcre2_match_data_free(data); }
};
struct FreeMatchContext {
    void operator()(pcre2_match_context* context) const { pcre2_match_context_free(context); }
};

std::string error_text(int code) {
    PCRE2_UCHAR buffer[256] = {};
    pcre2_get_error_message(code, buffer, sizeof(buffer));
    return reinterpret_cast<const char*>(buffer);
}

}  // namespace

struct RegexScratch::Impl {
    // A search reports the whole match only, so one pair of offsets is enough.
    std::unique_ptr<pcre2_match_data, FreeMatchData> data{pcre2_match_data_create(1, nullptr)};
    std::unique_ptr<pcre2_match_context, FreeMatchContext> context{pcre2_match_context_create(nullptr)};
};

RegexScratch::RegexScratch() : impl_(std::make_unique<Impl>()) {
    check(impl_->data != nullptr && impl_->context != nullptr, "out of memory for a regex search");
    pcre2_set_match_limit(impl_->context.get(), kMatchLimit);
    pcre2_set_depth_limit(impl_->context.get(), kDepthLimit);
    pcre2_set_heap_limit(impl_->context.get(), kHeapLimitKib);
}
RegexScratch::~RegexScratch() = default;
RegexScratch::RegexScratch(RegexScratch&&) noexcept = default;

struct Regex::Code {
    std::unique_ptr<pcre2_code, FreeCode> code;
    bool jit = false;
};

Regex::Regex() = default;

Result<Regex> Regex::compile(std::string_view pattern) {
    Result<std::string> translated = to_pcre2_pattern(pattern);
    if (!translated.ok()) {
        return translated.status();
    }
    return build(pattern, *translated, false);
}

Result<Regex> Regex::literal(std::string_view text) {
    return build(text, std::string(text), true);
}

Result<Regex> Regex::build(std::string_view shown, const std::string& pattern, bool literal) {
    int error = 0;
    PCRE2_SIZE offset = 0;
    // Oniguruma's ^ and $ stand at every line's border.
    const uint32_t options = PCRE2_UTF | (literal ? PCRE2_LITERAL : PCRE2_UCP | PCRE2_MULTILINE);
    auto code = std::make_shared<Code>();
    code->code.reset(pcre2_compile(reinterpret_cast<PCRE2_SPTR>(pattern.data()), pattern.size(), options,
                                   &error, &offset, nullptr));
    if (code->code == nullptr) {
        return invalid_argument(fmt::format("the regex {:?} cannot be used: {}", shown, error_text(error)));
    }
    code->jit = pcre2_jit_compile(code->code.get(), PCRE2_JIT_COMPLETE) == 0;
    Regex made;
    made.code_ = std::move(code);
    return made;
}

Regex::Outcome Regex::search(std::string_view subject, size_t from, RegexScratch& scratch,
                             Span& match) const {
    const auto* text = reinterpret_cast<PCRE2_SPTR>(subject.data());
    pcre2_match_data* data = scratch.impl_->data.get();
    pcre2_match_context* context = scratch.impl_->context.get();
    const pcre2_code* code = code_->code.get();
    int found = PCRE2_ERROR_JIT_STACKLIMIT;
    if (code_->jit) {
        found = pcre2_jit_match(code, text, subject.size(), from, 0, data, context);
    }
    if (found == PCRE2_ERROR_JIT_STACKLIMIT) {  // the interpreter keeps its frames on the heap
        found =
            pcre2_match(code, text, subject.size(), from, PCRE2_NO_UTF_CHECK | PCRE2_NO_JIT, data, context);
    }
    if (found < 0) {
        return found == PCRE2_ERROR_NOMATCH ? Outcome::kNone : Outcome::kLimit;
    }
    const PCRE2_SIZE* offsets = pcre2_get_ovector_pointer(data);
    match = {offsets[0], offsets[1]};
    return Outcome::kMatch;
}

Regex::Outcome RegexIterator::next(Span& match) {
    while (from_ <= subject_.size()) {
        const Regex::Outcome outcome = regex_.search(subject_, from_, scratch_, match);
        if (outcome != Regex::Outcome::kMatch) {
            return outcome;
        }
        if (!match.empty() || last_end_ != match.end) {
            from_ = match.end;
            last_end_ = match.end;
            return outcome;
        }
        from_ += from_ < subject_.size() ? utf8_next(subject_.substr(from_)).length : 1;
    }
    return Regex::Outcome::kNone;
}

}  // namespace tessera::bpe

#include "text/bpe/normalizer.h"

#include <cstdlib>
#include <fmt/format.h>
#include <memory>
#include <utf8proc.h>

#include "base/utf8.h"
#include "text/bpe/characters.h"
#include "text/bpe/spec.h"

namespace tessera::bpe {
namespace {

constexpr int kDepthMax = 16;

struct FreeText {
    void operator()(utf8proc_uint8_t* text) const { std::free(text); }  // utf8proc allocates with malloc
};

std::string normal_form(std::string_view text, int options) {
    utf8proc_uint8_t* raw = nullptr;
    const utf8proc_ssize_t size = utf8proc_map(reinterpret_cast<const utf8proc_uint8_t*>(text.data()),
                                               static_cast<utf8proc_ssize_t>(text.size()), &raw,
                                               static_cast<utf8proc_option_t>(UTF8PROC_STABLE | options));
    const std::unique_ptr<utf8proc_uint8_t, FreeText> owned(raw);
    check(size >= 0, "utf8proc refused a valid text");
    return {reinterpret_cast<const char*>(raw), static_cast<size_t>(size)};
}

std::string lowercase(std::string_view text) {
    constexpr char32_t kCapitalIWithDot = 0x130;  // the one character whose lower case is two
    std::string out;
    out.reserve(text.size());
    while (!text.empty()) {
        const Utf8Step step = utf8_next(text);
        if (step.code_point == kCapitalIWithDot) {
            out += "i\xCC\x87";
        } else {
            utf8_append(
                out, static_cast<char32_t>(utf8proc_tolower(static_cast<utf8proc_int32_t>(step.code_point))));
        }
        text.remove_prefix(step.length);
    }
    return out;
}

std::string strip(std::string_view text, bool left, bool right) {
    size_t begin = text.size();
    size_t end = 0;
    for (size_t at = 0; at < text.size();) {
        const Utf8Step step = utf8_next(text.substr(at));
        if (!is_white_space(step.code_point)) {
            begin = std::min(begin, at);
            end = at + step.length;
        }
        at += step.length;
    }
    if (end == 0) {  // white space only
        return left || right ? std::string() : std::string(text);
    }
    begin = left ? begin : 0;
    end = right ? end : text.size();
    return std::string(text.substr(begin, end - begin));
}

}  // namespace

Result<Normalizer> Normalizer::parse(const json::Value& spec) {
    Normalizer made;
    if (Status status = made.add(spec, 0); !status.ok()) {
        return status;
    }
    return made;
}

Status Normalizer::add(const json::Value& spec, int depth) {
    if (spec.is_null()) {
        return {};
    }
    const std::string type = spec_type(spec);
    if (type == "Sequence") {
        const json::Value* inner = spec.find("normalizers");
        if (inner == nullptr || !inner->is_array() || depth >= kDepthMax) {
            return invalid_argument("normalizer: a Sequence needs a list \"normalizers\"");
        }
        for (const json::Value& item : inner->items()) {
            if (Status status = add(item, depth + 1); !status.ok()) {
                return status;
            }
        }
        return {};
    }
    if (type == "Replace") {
        return add_replace(spec);
    }
    if (type == "Prepend") {
        steps_.push_back({.kind = Kind::kPrepend, .content = spec_string(spec, "prepend")});
        return {};
    }
    if (type == "Strip") {
        steps_.push_back({.kind = Kind::kStrip,
                          .left = spec_bool(spec, "strip_left", true),
                          .right = spec_bool(spec, "strip_right", true)});
        return {};
    }
    constexpr std::pair<std::string_view, Kind> kPlain[] = {{"NFC", Kind::kNfc},
                                                            {"NFD", Kind::kNfd},
                                                            {"NFKC", Kind::kNfkc},
                                                            {"NFKD", Kind::kNfkd},
                                                            {"Lowercase", Kind::kLowercase}};
    for (const auto& [name, kind] : kPlain) {
        if (type == name) {
            steps_.push_back({.kind = kind});
            return {};
        }
    }
    return unimplemented(fmt::format(
        "normalizer: type {:?} is not supported (NFC, NFD, NFKC, NFKD, Lowercase, Strip, Prepend, "
        "Replace and Sequence are)",
        type));
}

Status Normalizer::add_replace(const json::Value& spec) {
    Result<Regex> regex = spec_pattern(spec);
    if (!regex.ok()) {
        return {regex.status().code(), "normalizer: Replace: " + regex.status().message()};
    }
    steps_.push_back(
        {.kind = Kind::kReplace, .content = spec_string(spec, "content"), .regex = regex.take()});
    return {};
}

Result<std::string> Normalizer::apply(std::string_view text, RegexScratch& scratch) const {
    std::string out(text);
    for (const Step& step : steps_) {
        Result<std::string> next = run(step, std::move(out), scratch);
        if (!next.ok()) {
            return next;
        }
        out = next.take();
    }
    return out;
}

Result<std::string> Normalizer::run(const Step& step, std::string text, RegexScratch& scratch) {
    switch (step.kind) {
        case Kind::kNfc:
            return normal_form(text, UTF8PROC_COMPOSE);
        case Kind::kNfd:
            return normal_form(text, UTF8PROC_DECOMPOSE);
        case Kind::kNfkc:
            return normal_form(text, UTF8PROC_COMPOSE | UTF8PROC_COMPAT);
        case Kind::kNfkd:
            return normal_form(text, UTF8PROC_DECOMPOSE | UTF8PROC_COMPAT);
        case Kind::kLowercase:
            return lowercase(text);
        case Kind::kStrip:
            return strip(text, step.left, step.right);
        case Kind::kPrepend:
            return text.empty() ? std::move(text) : step.content + text;
        case Kind::kReplace:
            break;
    }
    std::string out;
    size_t done = 0;
    RegexIterator matches(*step.regex, text, scratch);
    Span match;
    Regex::Outcome outcome;
    while ((outcome = matches.next(match)) == Regex::Outcome::kMatch) {
        out.append(text, done, match.begin - done);
        out += step.content;
        done = match.end;
    }
    if (outcome == Regex::Outcome::kLimit) {
        return resource_exhausted("a normalizer's regex ran over its limit on this text");
    }
    out.append(text, done);
    return out;
}

}  // namespace tessera::bpe

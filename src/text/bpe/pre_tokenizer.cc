#include "text/bpe/pre_tokenizer.h"

#include <algorithm>
#include <fmt/format.h>

#include "text/bpe/spec.h"

namespace tessera::bpe {
namespace {

constexpr int kDepthMax = 16;
// GPT-2's split, which ByteLevel applies unless use_regex is false.
constexpr std::string_view kByteLevelPattern =
    R"('s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+)";

using Matches = std::vector<std::pair<Span, bool>>;

// Joins each match with what comes before it (or, walking backwards, after it).
template <typename Iterator, typename Join>
void merge_matches(Iterator begin, Iterator end, std::vector<Span>& out, Join join) {
    bool previous_match = false;
    for (Iterator at = begin; at != end; ++at) {
        const auto& [span, is_match] = *at;
        if (is_match && !previous_match && !out.empty()) {
            join(out.back(), span);
        } else {
            out.push_back(span);
        }
        previous_match = is_match;
    }
}

std::vector<Span> contiguous(const Matches& matches) {
    std::vector<Span> out;
    bool previous_match = false;
    for (const auto& [span, is_match] : matches) {
        if (is_match == previous_match && !out.empty()) {
            out.back().end = span.end;
        } else {
            out.push_back(span);
        }
        previous_match = is_match;
    }
    return out;
}

std::vector<Span> pieces_of(const Matches& matches, SplitBehavior behavior) {
    std::vector<Span> out;
    switch (behavior) {
        case SplitBehavior::kIsolated:
        case SplitBehavior::kRemoved:
            for (const auto& [span, is_match] : matches) {
                if (!is_match || behavior == SplitBehavior::kIsolated) {
                    out.push_back(span);
                }
            }
            return out;
        case SplitBehavior::kContiguous:
            return contiguous(matches);
        case SplitBehavior::kMergedWithPrevious:
            merge_matches(matches.begin(), matches.end(), out,
                          [](Span& to, Span from) { to.end = from.end; });
            return out;
        case SplitBehavior::kMergedWithNext:
            merge_matches(matches.rbegin(), matches.rend(), out,
                          [](Span& to, Span from) { to.begin = from.begin; });
            std::reverse(out.begin(), out.end());
            return out;
    }
    return out;
}

}  // namespace

Result<PreTokenizer> PreTokenizer::parse(const json::Value& spec) {
    PreTokenizer made;
    if (Status status = made.add(spec, 0); !status.ok()) {
        return status;
    }
    if (!made.byte_level_) {
        return unimplemented("pre_tokenizer: must end in ByteLevel (only byte-level BPE is supported)");
    }
    return made;
}

Status PreTokenizer::add(const json::Value& spec, int depth) {
    const std::string type = spec_type(spec);
    if (byte_level_) {
        return unimplemented(fmt::format("pre_tokenizer: {:?} after ByteLevel is not supported", type));
    }
    if (type == "Sequence") {
        const json::Value* inner = spec.find("pretokenizers");
        if (inner == nullptr || !inner->is_array() || depth >= kDepthMax) {
            return invalid_argument("pre_tokenizer: a Sequence needs a list \"pretokenizers\"");
        }
        for (const json::Value& item : inner->items()) {
            if (Status status = add(item, depth + 1); !status.ok()) {
                return status;
            }
        }
        return {};
    }
    if (type == "Split") {
        return add_split(spec);
    }
    if (type == "ByteLevel") {
        return add_byte_level(spec);
    }
    return unimplemented(
        fmt::format("pre_tokenizer: type {:?} is not supported (Split, ByteLevel and Sequence are)", type));
}

Status PreTokenizer::add_split(const json::Value& spec) {
    constexpr std::pair<std::string_view, SplitBehavior> kBehaviors[] = {
        {"Isolated", SplitBehavior::kIsolated},
        {"Removed", SplitBehavior::kRemoved},
        {"MergedWithPrevious", SplitBehavior::kMergedWithPrevious},
        {"MergedWithNext", SplitBehavior::kMergedWithNext},
        {"Contiguous", SplitBehavior::kContiguous}};
    Result<Regex> regex = spec_pattern(spec);
    if (!regex.ok()) {
        return {regex.status().code(), "pre_tokenizer: Split: " + regex.status().message()};
    }
    const std::string name = spec_string(spec, "behavior");
    const auto* behavior = std::find_if(std::begin(kBehaviors), std::end(kBehaviors),
                                        [&](const auto& known) { return known.first == name; });
    if (behavior == std::end(kBehaviors)) {
        return invalid_argument(fmt::format(
            "pre_tokenizer: Split: behavior {:?} is none of Isolated, Removed, MergedWithPrevious, "
            "MergedWithNext, Contiguous",
            name));
    }
    splits_.push_back({regex.take(), behavior->second, spec_bool(spec, "invert", false)});
    return {};
}

Status PreTokenizer::add_byte_level(const json::Value& spec) {
    byte_level_ = true;
    prefix_space_ = spec_bool(spec, "add_prefix_space", true);
    prefix_before_ = splits_.size();
    if (spec_bool(spec, "use_regex", true)) {
        Result<Regex> regex = Regex::compile(kByteLevelPattern);
        if (!regex.ok()) {
            return regex.status();
        }
        splits_.push_back({regex.take(), SplitBehavior::kIsolated, false});
    }
    return {};
}

Status PreTokenizer::split(std::string_view text, SplitScratch& scratch) const {
    scratch.pieces.clear();
    if (!text.empty()) {
        scratch.pieces.push_back(text);
    }
    for (size_t i = 0; i <= splits_.size(); ++i) {
        if (prefix_space_ && i == prefix_before_) {
            add_prefix_spaces(scratch);
        }
        if (i == splits_.size()) {
            break;
        }
        scratch.next.clear();
        for (const std::string_view piece : scratch.pieces) {
            if (Status status = run(splits_[i], piece, scratch); !status.ok()) {
                return status;
            }
        }
        scratch.pieces.swap(scratch.next);
    }
    return {};
}

// Appends the parts of one piece to scratch.next.
Status PreTokenizer::run(const Split& split, std::string_view piece, SplitScratch& scratch) {
    RegexIterator iterator(split.regex, piece, scratch.regex);
    Matches& matches = scratch.matches;
    const bool direct = split.behavior == SplitBehavior::kIsolated;  // by far the most usual: no detour
    size_t done = 0;
    matches.clear();
    const auto put = [&](Span span, bool is_match) {
        if (!direct) {
            matches.emplace_back(span, is_match != split.invert);
        } else if (!span.empty()) {
            scratch.next.push_back(piece.substr(span.begin, span.end - span.begin));
        }
    };
    Span match;
    Regex::Outcome outcome;
    while ((outcome = iterator.next(match)) == Regex::Outcome::kMatch) {
        if (done != match.begin) {
            put({done, match.begin}, false);
        }
        put(match, true);
        done = match.end;
    }
    if (outcome == Regex::Outcome::kLimit) {
        return resource_exhausted("a split regex of the tokenizer ran over its limit on this text");
    }
    if (done != piece.size()) {
        put({done, piece.size()}, false);
    }
    if (!direct) {
        for (const Span span : pieces_of(matches, split.behavior)) {
            if (!span.empty()) {
                scratch.next.push_back(piece.substr(span.begin, span.end - span.begin));
            }
        }
    }
    return {};
}

void PreTokenizer::add_prefix_spaces(SplitScratch& scratch) const {
    for (std::string_view& piece : scratch.pieces) {
        if (!piece.starts_with(' ')) {
            piece = scratch.made.emplace_back(" " + std::string(piece));
        }
    }
}

}  // namespace tessera::bpe

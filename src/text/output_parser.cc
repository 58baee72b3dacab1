#include "text/output_parser.h"

#include <algorithm>
#include <array>

#include "base/utf8.h"
#include "text/parser/argument_types.h"
#include "text/parser/tag_scanner.h"

namespace tessera {
namespace {

enum Tag : int {
    kThinkEnd,
    kCallsBegin,
    kCallsEnd,
    kCallBegin,
    kCallEnd,
    kSep,
    kKeyBegin,
    kKeyEnd,
    kValueBegin,
    kValueEnd,
    kTagCount,
    kNoTag = -1,
};

// A state says where the text goes and which tags mean something in it; any other tag there is text.
enum class State {
    kReasoning,  // until </think>, or the calls begin
    kContent,    // until the calls begin
    kBetween,    // in the calls, outside of any: text is dropped
    kName,       // of a call
    kArguments,  // of a call, between them: text is dropped
    kKey,
    kAfterKey,  // text is dropped
    kValue,
};

using enum State;

std::string_view trimmed(std::string_view text) {
    constexpr std::string_view kSpace = " \t\n\r\f\v";
    const size_t begin = text.find_first_not_of(kSpace);
    return begin == std::string_view::npos ? std::string_view()
                                           : text.substr(begin, text.find_last_not_of(kSpace) - begin + 1);
}

}  // namespace

struct OutputParser::Impl {
    explicit Impl(OutputParserConfig given);

    void advance(bool at_end, OutputDelta& out);
    void take_text(std::string_view text, OutputDelta& out);
    void take_tag(int tag, OutputDelta& out);
    void take_tag_in_reasoning(int tag);
    void take_tag_in_name(int tag, OutputDelta& out);
    void take_tag_in_call(int tag, OutputDelta& out);
    void take_tag_in_value(int tag, OutputDelta& out);
    void end(OutputDelta& out);

    std::span<const std::string_view> active_tags() const;
    void drop_think_begin(bool at_end);
    bool begin_call(OutputDelta& out);
    void close_call(OutputDelta& out);
    void begin_value(OutputDelta& out);
    void close_value(bool whole, OutputDelta& out);
    void put_key(OutputDelta& out);
    void put_arguments(std::string_view json, OutputDelta& out);
    bool full() const { return begun >= config.tool_calls_max; }

    const OutputParserConfig config;
    const Hy3Tokens tokens;
    std::array<std::string_view, kTagCount> tags;    // [Tag]
    std::array<std::string_view, 2> reasoning_tags;  // </think>, <tool_calls>
    std::array<std::string_view, 1> content_tags;    // <tool_calls>
    State state = kContent;
    bool at_start = true;  // of the reasoning
    bool ended = false;
    int32_t begun = 0;   // calls
    int32_t closed = 0;  // calls
    std::string held;    // not yet decided
    std::string name, key, value;
    bool first_argument = true;
    ArgumentTypes types;  // of the value
};

OutputParser::Impl::Impl(OutputParserConfig given) : config(std::move(given)), tokens(config.suffix) {
    tags = {tokens.think_end,       tokens.tool_calls_begin, tokens.tool_calls_end, tokens.tool_call_begin,
            tokens.tool_call_end,   tokens.tool_sep,         tokens.arg_key_begin,  tokens.arg_key_end,
            tokens.arg_value_begin, tokens.arg_value_end};
    reasoning_tags = {tags[kThinkEnd], tags[kCallsBegin]};
    content_tags = {tags[kCallsBegin]};
    if (config.parse_reasoning && config.start == OutputStart::kReasoning) {
        state = kReasoning;
    }
}

std::span<const std::string_view> OutputParser::Impl::active_tags() const {
    const size_t calls = config.parse_tools ? 1 : 0;
    if (state == kReasoning) {
        return std::span(reasoning_tags).first(1 + calls);
    }
    if (state == kContent) {
        return std::span(content_tags).first(calls);
    }
    return tags;
}

// The tag that opens the reasoning is in the prompt; a model that writes it once more means nothing by it.
void OutputParser::Impl::drop_think_begin(bool at_end) {
    const std::string_view begin = tokens.think_begin;
    if (held.starts_with(begin)) {
        held.erase(0, begin.size());
        at_start = false;
    } else if (at_end || !begin.starts_with(held)) {
        at_start = false;
    }
}

void OutputParser::Impl::advance(bool at_end, OutputDelta& out) {
    // A character whose end has not come yet stays whole.
    std::string tail = held.substr(held.size() - (at_end ? 0 : utf8_incomplete_tail(held)));
    held.resize(held.size() - tail.size());
    if (state == kReasoning && at_start) {
        drop_think_begin(at_end && tail.empty());
    }
    size_t done = 0;
    while (!(state == kReasoning && at_start)) {
        const std::string_view rest = std::string_view(held).substr(done);
        TagHit hit = find_tag(rest, active_tags());
        if (hit.tag == kNoTag && at_end) {
            hit.text = rest.size();
        }
        take_text(rest.substr(0, hit.text), out);
        done += hit.text + hit.length;
        if (hit.tag == kNoTag) {
            break;
        }
        const int first_tag = state == kContent ? kCallsBegin : kThinkEnd;
        const bool in_order = state == kReasoning || state == kContent;
        take_tag(in_order ? first_tag + hit.tag : hit.tag, out);
    }
    held.erase(0, done);
    held += tail;
}

void OutputParser::Impl::take_text(std::string_view text, OutputDelta& out) {
    switch (state) {
        case kReasoning:
            out.reasoning += text;
            return;
        case kContent:
            out.content += text;
            return;
        case kName:
            name += text;
            return;
        case kKey:
            key += text;
            return;
        case kValue:
            if (types.only_string()) {
                std::string quoted;
                json::append_string(quoted, text);
                put_arguments(std::string_view(quoted).substr(1, quoted.size() - 2), out);
            } else {
                value += text;
            }
            return;
        case kBetween:
        case kArguments:
        case kAfterKey:
            return;
    }
}

void OutputParser::Impl::take_tag(int tag, OutputDelta& out) {
    switch (state) {
        case kReasoning:
            return take_tag_in_reasoning(tag);
        case kContent:
            state = kBetween;
            return;
        case kBetween:
            if (tag == kCallBegin && !full()) {
                name.clear();
                state = kName;
            }
            return;
        case kName:
            return take_tag_in_name(tag, out);
        case kArguments:
        case kKey:
        case kAfterKey:
            return take_tag_in_call(tag, out);
        case kValue:
            return take_tag_in_value(tag, out);
    }
}

void OutputParser::Impl::take_tag_in_reasoning(int tag) {
    state = tag == kThinkEnd ? kContent : kBetween;
}

// Known slips: a closing tag in the place of <tool_sep>, no <tool_sep> at all.
void OutputParser::Impl::take_tag_in_name(int tag, OutputDelta& out) {
    switch (tag) {
        case kSep:
        case kKeyEnd:
        case kValueEnd:
            state = begin_call(out) ? kArguments : kBetween;
            return;
        case kKeyBegin:
            state = begin_call(out) ? kArguments : kBetween;
            break;
        case kCallEnd:
        case kCallsEnd:
            if (begin_call(out)) {
                close_call(out);
            }
            state = kBetween;
            return;
        case kCallBegin:
            name.clear();
            return;
        default:
            return;
    }
    if (state == kArguments) {
        take_tag_in_call(tag, out);
    }
}

// Between and in the keys of a call. A call that is not closed ends where the next begins, or all calls end.
void OutputParser::Impl::take_tag_in_call(int tag, OutputDelta& out) {
    switch (tag) {
        case kKeyBegin:
            key.clear();
            state = kKey;
            return;
        case kKeyEnd:
        case kValueEnd:
            state = state == kKey ? kAfterKey : state;
            return;
        case kValueBegin:
            if (state != kArguments) {
                begin_value(out);
            }
            return;
        case kCallEnd:
        case kCallsBegin:
        case kCallsEnd:
            close_call(out);
            state = kBetween;
            return;
        case kCallBegin:
            close_call(out);
            state = kBetween;
            take_tag(tag, out);
            return;
        default:
            return;
    }
}

// In a value the tags of arguments are text, but for the value's end; those of calls end it.
void OutputParser::Impl::take_tag_in_value(int tag, OutputDelta& out) {
    switch (tag) {
        case kValueEnd:
            close_value(true, out);
            return;
        case kCallBegin:
        case kCallEnd:
        case kCallsEnd:
            close_value(true, out);
            take_tag_in_call(tag, out);
            return;
        default:
            take_text(tags[static_cast<size_t>(tag)], out);
    }
}

// Emits the name; false when there is none.
bool OutputParser::Impl::begin_call(OutputDelta& out) {
    const std::string_view shown = trimmed(name);
    if (shown.empty()) {
        return false;
    }
    out.tool_calls.push_back({.index = begun, .name = std::string(shown), .arguments = {}});
    name = std::string(shown);
    ++begun;
    first_argument = true;
    return true;
}

void OutputParser::Impl::close_call(OutputDelta& out) {
    put_arguments(first_argument ? "{}" : "}", out);
    ++closed;
}

void OutputParser::Impl::begin_value(OutputDelta& out) {
    state = kValue;
    types = argument_types(config.tools, name, key);
    value.clear();
    if (types.only_string()) {
        put_key(out);
        put_arguments("\"", out);
    }
}

// whole: the value's text is complete. Half a string is still a string; half a number is not that number.
void OutputParser::Impl::close_value(bool whole, OutputDelta& out) {
    state = kArguments;
    if (types.only_string()) {
        put_arguments("\"", out);
    } else if (whole) {
        put_key(out);
        put_arguments(argument_json(types, value), out);
    }
}

void OutputParser::Impl::put_key(OutputDelta& out) {
    std::string json = first_argument ? "{" : ", ";
    json::append_string(json, key);
    json += ": ";
    put_arguments(json, out);
    first_argument = false;
}

void OutputParser::Impl::put_arguments(std::string_view json, OutputDelta& out) {
    const int32_t index = begun - 1;
    if (out.tool_calls.empty() || out.tool_calls.back().index != index) {
        out.tool_calls.push_back({.index = index, .name = {}, .arguments = {}});
    }
    out.tool_calls.back().arguments += json;
}

void OutputParser::Impl::end(OutputDelta& out) {
    advance(true, out);
    if (state == kValue) {
        close_value(false, out);
    }
    if (state == kArguments || state == kKey || state == kAfterKey) {
        close_call(out);
    }
    state = kBetween;
}

OutputParser::OutputParser(OutputParserConfig config) : impl_(std::make_unique<Impl>(std::move(config))) {}
OutputParser::~OutputParser() = default;

OutputDelta OutputParser::push(std::string_view text) {
    OutputDelta out;
    if (!impl_->ended) {
        impl_->held += text;
        impl_->advance(false, out);
    }
    return out;
}

OutputDelta OutputParser::finish() {
    OutputDelta out;
    if (!impl_->ended) {
        impl_->end(out);
        impl_->ended = true;
    }
    return out;
}

int32_t OutputParser::tool_calls() const {
    return impl_->begun;
}
bool OutputParser::limit_reached() const {
    return impl_->closed >= impl_->config.tool_calls_max;
}

}  // namespace tessera

#include "server/token_stream.h"

#include <algorithm>
#include <utility>

namespace tessera {
namespace {

// Code points of valid UTF-8: every byte that does not continue one.
int64_t count_characters(std::string_view text) {
    return std::count_if(text.begin(), text.end(), [](char c) { return (c & 0xC0) != 0x80; });
}

}  // namespace

void append_delta(OutputDelta& out, OutputDelta&& more) {
    out.reasoning += more.reasoning;
    out.content += more.content;
    for (ToolCallDelta& call : more.tool_calls) {
        if (!out.tool_calls.empty() && out.tool_calls.back().index == call.index && call.name.empty()) {
            out.tool_calls.back().arguments += call.arguments;
        } else {
            out.tool_calls.push_back(std::move(call));
        }
    }
}

TokenStream::TokenStream(const Tokenizer& tokenizer, TokenStreamConfig config,
                         std::function<void(int32_t n)> answer_complete)
    : include_stop_(config.include_stop),
      has_stop_(!config.stop.empty()),
      min_tokens_(config.min_tokens),
      think_end_(config.think_end),
      stop_ids_(std::move(config.stop_ids)),
      answer_complete_(std::move(answer_complete)),
      detokenizer_(tokenizer, config.skip_special),
      matcher_(std::move(config.stop), config.include_stop) {
    if (config.parser) {
        reasoning_ = think_end_ >= 0 && config.parser->start == OutputStart::kReasoning;
        parser_.emplace(std::move(*config.parser));
    }
}

StreamDelta TokenStream::push(TokenEvent&& event) {
    StreamDelta delta;
    prompt_tokens_ = std::max(prompt_tokens_, event.prompt_tokens);
    cached_tokens_ = std::max(cached_tokens_, event.cached_tokens);
    for (size_t i = 0; i < event.tokens.size() && !stopped_; ++i) {
        const bool stop_token = event.finish == FinishReason::kStop && i + 1 == event.tokens.size() &&
                                event.tokens[i].token == event.stop_token;
        push_token(std::move(event.tokens[i]), stop_token && !include_stop_, delta);
    }
    if (event.finish != FinishReason::kNone) {
        finish(event, delta);
    }
    return delta;
}

void TokenStream::push_token(GeneratedToken&& token, bool hidden, StreamDelta& delta) {
    ++count_;
    const TokenId id = token.token;
    delta.tokens.push_back({std::move(token), characters_});
    if (reasoning_) {
        reasoning_ = id != think_end_;
        reasoning_tokens_ += reasoning_ ? 1 : 0;
    }
    if (hidden) {
        return;
    }
    const std::string text = detokenizer_.push(id);
    characters_ += count_characters(text);
    if (!has_stop_ || count_ <= min_tokens_) {
        show(text, delta.output);
    } else {
        StopMatcher::Output safe = matcher_.push(text);
        show(safe.text, delta.output);
        if (safe.stopped) {
            stop_text_ = std::move(safe.found);
            complete();
        }
    }
    if (!stopped_ && parser_ && parser_->limit_reached()) {
        complete();
    }
}

void TokenStream::show(std::string_view text, OutputDelta& out) {
    if (text.empty()) {
        return;
    }
    if (parser_) {
        append_delta(out, parser_->push(text));
    } else {
        out.content += text;
    }
}

void TokenStream::complete() {
    stopped_ = true;
    answer_complete_(count_);
}

void TokenStream::finish(const TokenEvent& event, StreamDelta& delta) {
    if (!stopped_) {
        const std::string rest = detokenizer_.flush();
        if (has_stop_) {
            show(matcher_.push(rest).text, delta.output);
            show(matcher_.flush(), delta.output);
        } else {
            show(rest, delta.output);
        }
    }
    if (parser_) {
        append_delta(delta.output, parser_->finish());
    }
    // A stop string was shown to the reader as the end; an abort that crossed it changes nothing.
    delta.finish = stopped_ ? FinishReason::kStop : event.finish;
    delta.error = event.error;
    delta.stop_text = stop_text_;
    if (!stopped_ && std::find(stop_ids_.begin(), stop_ids_.end(), event.stop_token) != stop_ids_.end()) {
        delta.stop_token = event.stop_token;
    }
}

}  // namespace tessera

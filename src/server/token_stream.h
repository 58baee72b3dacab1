// TokenStream: the events of one sequence -> what a reader sees of it. Detokenises, finds stop strings,
// parses reasoning and tool calls. Knows nothing of HTTP: the server, `generate` and `chat` use the same one.
#pragma once

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "text/detokenizer.h"
#include "text/output_parser.h"
#include "text/tokenizer.h"
#include "types/token_event.h"

namespace tessera {

struct TokenStreamConfig {
    bool skip_special = true;
    std::vector<std::string> stop;
    std::vector<TokenId> stop_ids;             // the request's own: named as the reason when one ends it
    bool include_stop = false;                 // show the stop string, or the text of the stop token
    int32_t min_tokens = 0;                    // stop strings count only in text after this many tokens
    std::optional<OutputParserConfig> parser;  // absent: all text is content
    TokenId think_end =
        -1;  // counts reasoning tokens when the output starts in reasoning; -1 = does not count
};

// One generated token that is part of the answer.
struct StreamToken {
    GeneratedToken token;
    int64_t text_offset = 0;  // characters (code points) of the output's text before it
};

struct StreamDelta {
    OutputDelta output;
    std::vector<StreamToken> tokens;            // added to the answer by this event
    FinishReason finish = FinishReason::kNone;  // set by the last event
    std::string stop_text;                      // with FinishReason::kStop: the stop string that ended it,
    TokenId stop_token = -1;                    // or the stop id of the request's own; else "" and -1
    std::string error;                          // with FinishReason::kError
};

// Not thread-safe: one event at a time, in order. The tokenizer must outlive it.
class TokenStream {
  public:
    // answer_complete(n): the first n tokens are the answer (a stop string was found, or no more tool calls
    // are wanted). The owner passes it to Engine::finish(); the sequence's last event still comes.
    TokenStream(const Tokenizer& tokenizer, TokenStreamConfig config,
                std::function<void(int32_t n)> answer_complete);

    StreamDelta push(TokenEvent&& event);

    int32_t prompt_tokens() const { return prompt_tokens_; }
    int32_t cached_tokens() const { return cached_tokens_; }
    int32_t completion_tokens() const { return count_; }
    int32_t reasoning_tokens() const { return reasoning_tokens_; }
    int32_t tool_calls() const { return parser_ ? parser_->tool_calls() : 0; }

  private:
    void push_token(GeneratedToken&& token, bool hidden, StreamDelta& delta);
    void show(std::string_view text, OutputDelta& out);
    void complete();
    void finish(const TokenEvent& event, StreamDelta& delta);

    const bool include_stop_;
    const bool has_stop_;
    const int32_t min_tokens_;
    const TokenId think_end_;
    const std::vector<TokenId> stop_ids_;
    std::function<void(int32_t)> answer_complete_;
    Detokenizer detokenizer_;
    StopMatcher matcher_;
    std::optional<OutputParser> parser_;
    bool stopped_ = false;  // the answer is complete, whatever still comes
    std::string stop_text_;
    bool reasoning_ = false;  // think_end has not come yet
    int64_t characters_ = 0;
    int32_t count_ = 0, reasoning_tokens_ = 0;
    int32_t prompt_tokens_ = 0, cached_tokens_ = 0;
};

// Appends what `more` adds: texts are joined, pieces of the same tool call merged.
void append_delta(OutputDelta& out, OutputDelta&& more);

}  // namespace tessera

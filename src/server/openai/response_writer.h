// ResponseWriter: the JSON of answers, chat and text completions, whole and in server-sent events. Pure: it
// holds no state of the stream (response_stream.h does), so that both ways of answering are made of the same
// pieces.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "server/token_stream.h"

namespace tessera {

struct Usage {
    int64_t prompt_tokens = 0;
    int64_t completion_tokens = 0;
    int64_t cached_tokens = 0;
    int64_t reasoning_tokens = 0;
};

struct ToolCall {
    std::string id;
    std::string name;
    std::string arguments;
};

// What one choice says: all of it, or the part that one event adds.
struct ChoiceText {
    std::string reasoning;
    std::string content;
    std::vector<ToolCallDelta> tool_calls;  // streamed pieces
    std::vector<ToolCall> whole_calls;      // of a whole answer
    std::vector<StreamToken> tokens;        // generated tokens, for logprobs and token_ids
    // Where a choice tells its prompt's ids (text completions that return ids), else null.
    const std::vector<TokenId>* prompt_ids = nullptr;
};

// How a choice ended.
struct ChoiceEnd {
    std::string finish_reason;  // "stop", "length", "tool_calls"
    std::string stop_text;      // the stop string that ended it, "" = none
    TokenId stop_token = -1;    // the stop id of the request that ended it, -1 = none
};

struct WriterConfig {
    bool chat = true;
    std::string id;  // "chatcmpl-..." or "cmpl-..."
    int64_t created = 0;
    std::string model;
    std::optional<int32_t> logprobs;
    bool token_ids = false;
    bool usage_member = false;  // chunks carry "usage": null
};

// The tokenizer must outlive the writer.
class ResponseWriter {
  public:
    ResponseWriter(const Tokenizer& tokenizer, WriterConfig config);

    const WriterConfig& config() const { return config_; }

    // Each event is "data: {...}\n\n". usage: null writes "usage":null where the stream has that member.
    // prompt_ids: null unless ids are returned.
    std::string role_event(int index, const std::vector<TokenId>* prompt_ids) const;
    // call_ids: of the tool calls that `text` begins, in order.
    std::string text_event(int index, const ChoiceText& text, const std::vector<std::string>& call_ids,
                           const Usage* usage) const;
    std::string finish_event(int index, const ChoiceEnd& end, const Usage* usage) const;
    std::string usage_event(const Usage& usage) const;

    // A whole answer: begin, the choices in order with a comma between, end.
    std::string whole_begin() const;
    std::string whole_choice(int index, const ChoiceText& text, const ChoiceEnd& end) const;
    std::string whole_end(const Usage& usage, const std::vector<TokenId>* prompt_ids) const;

  private:
    std::string event_begin(int index) const;
    // end: null while the choice goes on.
    void event_end(std::string& out, const ChoiceText* text, const ChoiceEnd* end, const Usage* usage) const;
    void append_logprobs(std::string& out, const std::vector<StreamToken>& tokens) const;
    void append_chat_logprobs(std::string& out, const std::vector<StreamToken>& tokens) const;
    void append_text_logprobs(std::string& out, const std::vector<StreamToken>& tokens) const;
    void append_token_ids(std::string& out, const ChoiceText& text) const;
    void append_chat_entry(std::string& out, TokenId token, float logprob) const;
    std::string token_text(TokenId token) const;

    const Tokenizer& tokenizer_;
    const WriterConfig config_;
    std::string event_head_;  // all of an event up to the choice's index
    std::string whole_head_;
};

inline constexpr std::string_view kStreamEnd = "data: [DONE]\n\n";
inline constexpr std::string_view kPing = ": ping\n\n";

}  // namespace tessera

#include "server/openai/response_writer.h"

#include <algorithm>
#include <cmath>
#include <fmt/format.h>
#include <iterator>
#include <unordered_set>
#include <utility>

#include "base/json.h"
#include "base/utf8.h"

namespace tessera {
namespace {

constexpr float kLogprobMin = -9999.0F;  // OpenAI's stand-in for minus infinity, which JSON cannot say
constexpr std::string_view kFingerprint = "tessera-" TESSERA_VERSION;

template <typename... Args>
void append(std::string& out, fmt::format_string<Args...> format, Args&&... args) {
    fmt::format_to(std::back_inserter(out), format, std::forward<Args>(args)...);
}

void append_member(std::string& out, std::string_view key, std::string_view text) {
    append(out, R"("{}":)", key);
    json::append_string(out, text);
}

void append_number(std::string& out, float logprob) {
    append(out, "{}", std::isfinite(logprob) && logprob > kLogprobMin ? logprob : kLogprobMin);
}

template <typename Items, typename Write>
void append_list(std::string& out, const Items& items, Write&& write) {
    out += '[';
    for (auto item = std::begin(items); item != std::end(items); ++item) {
        if (item != std::begin(items)) {
            out += ',';
        }
        write(*item);
    }
    out += ']';
}

void append_ids(std::string& out, const std::vector<TokenId>& ids) {
    append_list(out, ids, [&](TokenId id) { append(out, "{}", id); });
}

void append_usage(std::string& out, const Usage& usage) {
    append(
        out,
        R"("usage":{{"prompt_tokens":{},"total_tokens":{},"completion_tokens":{},)"
        R"("prompt_tokens_details":{{"cached_tokens":{}}},"completion_tokens_details":{{"reasoning_tokens":{}}}}})",
        usage.prompt_tokens, usage.prompt_tokens + usage.completion_tokens, usage.completion_tokens,
        usage.cached_tokens, usage.reasoning_tokens);
}

// stop_reason is vLLM's: what ended the choice, null when that was the model's own end or a limit.
void append_finish(std::string& out, const ChoiceEnd& end) {
    append(out, R"(,"finish_reason":"{}",)", end.finish_reason);
    if (!end.stop_text.empty()) {
        append_member(out, "stop_reason", end.stop_text);
    } else if (end.stop_token >= 0) {
        append(out, R"("stop_reason":{})", end.stop_token);
    } else {
        out += R"("stop_reason":null)";
    }
}

// vLLM renamed reasoning_content; clients read one or the other.
void append_reasoning(std::string& out, std::string_view reasoning) {
    append_member(out, "reasoning_content", reasoning);
    out += ',';
    append_member(out, "reasoning", reasoning);
}

void append_call_deltas(std::string& out, const std::vector<ToolCallDelta>& calls,
                        const std::vector<std::string>& ids) {
    size_t next_id = 0;
    append_list(out, calls, [&](const ToolCallDelta& call) {
        append(out, R"({{"index":{})", call.index);
        out += call.name.empty() ? R"(,"function":{)" : ",";
        if (!call.name.empty()) {
            append_member(out, "id", ids[next_id++]);
            out += R"(,"type":"function","function":{)";
            append_member(out, "name", call.name);
            out += ',';
        }
        append_member(out, "arguments", call.arguments);
        out += "}}";
    });
}

void append_message(std::string& out, const ChoiceText& text) {
    out += R"("message":{"role":"assistant","content":)";
    if (text.content.empty() && !text.whole_calls.empty()) {
        out += "null";
    } else {
        json::append_string(out, text.content);
    }
    out += R"(,"refusal":null)";
    if (!text.reasoning.empty()) {
        out += ',';
        append_reasoning(out, text.reasoning);
    }
    if (!text.whole_calls.empty()) {
        out += R"(,"tool_calls":)";
        append_list(out, text.whole_calls, [&](const ToolCall& call) {
            out += '{';
            append_member(out, "id", call.id);
            out += R"(,"type":"function","function":{)";
            append_member(out, "name", call.name);
            out += ',';
            append_member(out, "arguments", call.arguments);
            out += "}}";
        });
    }
    out += '}';
}

}  // namespace

ResponseWriter::ResponseWriter(const Tokenizer& tokenizer, WriterConfig config)
    : tokenizer_(tokenizer), config_(std::move(config)) {
    std::string head = "{";
    append_member(head, "id", config_.id);
    const std::string_view object = config_.chat ? "chat.completion" : "text_completion";
    std::string tail;
    append(tail, R"(,"created":{},)", config_.created);
    append_member(tail, "model", config_.model);
    append(tail, R"(,"system_fingerprint":"{}","choices":[)", kFingerprint);
    event_head_ = fmt::format(R"(data: {},"object":"{}{}"{}{{"index":)", head, object,
                              config_.chat ? ".chunk" : "", tail);
    whole_head_ = fmt::format(R"({},"object":"{}"{})", head, object, tail);
}

// ---------------------------------------------------------------------------------------------------------------
// Events

std::string ResponseWriter::event_begin(int index) const {
    std::string out = event_head_;
    append(out, "{},", index);
    return out;
}

void ResponseWriter::event_end(std::string& out, const ChoiceText* text, const ChoiceEnd* end,
                               const Usage* usage) const {
    out += R"(,"logprobs":)";
    if (config_.logprobs && text != nullptr && !text->tokens.empty()) {
        append_logprobs(out, text->tokens);
    } else {
        out += "null";
    }
    if (end != nullptr) {
        append_finish(out, *end);
    } else {
        out += R"(,"finish_reason":null)";
    }
    if (config_.token_ids && text != nullptr) {
        append_token_ids(out, *text);
    }
    out += "}]";
    if (usage != nullptr) {
        out += ',';
        append_usage(out, *usage);
    } else if (config_.usage_member) {
        out += R"(,"usage":null)";
    }
    out += "}\n\n";
}

std::string ResponseWriter::role_event(int index, const std::vector<TokenId>* prompt_ids) const {
    std::string out = event_begin(index);
    out += R"("delta":{"role":"assistant","content":""},"logprobs":null,"finish_reason":null}])";
    if (prompt_ids != nullptr) {
        out += R"(,"prompt_token_ids":)";
        append_ids(out, *prompt_ids);
    }
    if (config_.usage_member) {
        out += R"(,"usage":null)";
    }
    out += "}\n\n";
    return out;
}

std::string ResponseWriter::text_event(int index, const ChoiceText& text,
                                       const std::vector<std::string>& call_ids, const Usage* usage) const {
    std::string out = event_begin(index);
    if (!config_.chat) {
        append_member(out, "text", text.content);
        event_end(out, &text, nullptr, usage);
        return out;
    }
    out += R"("delta":{)";
    const size_t start = out.size();
    const auto separate = [&] { out += out.size() > start ? "," : ""; };
    if (!text.reasoning.empty()) {
        append_reasoning(out, text.reasoning);
    }
    if (!text.content.empty() || (text.reasoning.empty() && text.tool_calls.empty())) {
        separate();
        append_member(out, "content", text.content);
    }
    if (!text.tool_calls.empty()) {
        separate();
        out += R"("tool_calls":)";
        append_call_deltas(out, text.tool_calls, call_ids);
    }
    out += '}';
    event_end(out, &text, nullptr, usage);
    return out;
}

std::string ResponseWriter::finish_event(int index, const ChoiceEnd& end, const Usage* usage) const {
    std::string out = event_begin(index);
    out += config_.chat ? R"("delta":{})" : R"("text":"")";
    event_end(out, nullptr, &end, usage);
    return out;
}

std::string ResponseWriter::usage_event(const Usage& usage) const {
    std::string out = event_head_.substr(0, event_head_.rfind('[') + 1);
    out += "],";
    append_usage(out, usage);
    out += "}\n\n";
    return out;
}

// ---------------------------------------------------------------------------------------------------------------
// Whole answers

std::string ResponseWriter::whole_begin() const {
    return whole_head_;
}

std::string ResponseWriter::whole_choice(int index, const ChoiceText& text, const ChoiceEnd& end) const {
    std::string out = fmt::format(R"({{"index":{},)", index);
    if (config_.chat) {
        append_message(out, text);
    } else {
        append_member(out, "text", text.content);
    }
    out += R"(,"logprobs":)";
    if (config_.logprobs) {
        append_logprobs(out, text.tokens);
    } else {
        out += "null";
    }
    append_finish(out, end);
    if (config_.token_ids) {
        append_token_ids(out, text);
    }
    out += '}';
    return out;
}

std::string ResponseWriter::whole_end(const Usage& usage, const std::vector<TokenId>* prompt_ids) const {
    std::string out = "],";
    append_usage(out, usage);
    if (prompt_ids != nullptr) {
        out += R"(,"prompt_token_ids":)";
        append_ids(out, *prompt_ids);
    }
    out += '}';
    return out;
}

// ---------------------------------------------------------------------------------------------------------------
// Log-probabilities

std::string ResponseWriter::token_text(TokenId token) const {
    return utf8_replace_invalid(tokenizer_.token_bytes(token));
}

void ResponseWriter::append_logprobs(std::string& out, const std::vector<StreamToken>& tokens) const {
    if (config_.chat) {
        append_chat_logprobs(out, tokens);
    } else {
        append_text_logprobs(out, tokens);
    }
}

// The members of {"token","logprob","bytes"}, without the braces. `bytes` is exact where `token` shows
// U+FFFD.
void ResponseWriter::append_chat_entry(std::string& out, TokenId token, float logprob) const {
    append_member(out, "token", token_text(token));
    out += R"(,"logprob":)";
    append_number(out, logprob);
    out += R"(,"bytes":)";
    append_list(out, tokenizer_.token_bytes(token),
                [&](char byte) { append(out, "{}", static_cast<int>(static_cast<unsigned char>(byte))); });
}

void ResponseWriter::append_chat_logprobs(std::string& out, const std::vector<StreamToken>& tokens) const {
    out += R"({"content":)";
    append_list(out, tokens, [&](const StreamToken& token) {
        out += '{';
        append_chat_entry(out, token.token.token, token.token.logprob);
        out += R"(,"top_logprobs":)";
        append_list(out, token.token.top, [&](const TokenLogprob& top) {
            out += '{';
            append_chat_entry(out, top.token, top.logprob);
            out += '}';
        });
        out += '}';
    });
    out += R"(,"refusal":null})";
}

// The older form has parallel lists, and objects keyed by token text: tokens that are not whole text get the
// spelling "bytes:\xe2\x82", so that keys stay distinct.
void ResponseWriter::append_text_logprobs(std::string& out, const std::vector<StreamToken>& tokens) const {
    const auto key = [&](TokenId token) {
        const std::string_view bytes = tokenizer_.token_bytes(token);
        if (utf8_valid(bytes)) {
            return std::string(bytes);
        }
        std::string text = "bytes:";
        for (const char byte : bytes) {
            append(text, "\\x{:02x}", static_cast<unsigned>(static_cast<unsigned char>(byte)));
        }
        return text;
    };
    out += R"({"tokens":)";
    append_list(out, tokens,
                [&](const StreamToken& token) { json::append_string(out, key(token.token.token)); });
    out += R"(,"token_logprobs":)";
    append_list(out, tokens, [&](const StreamToken& token) { append_number(out, token.token.logprob); });
    out += R"(,"top_logprobs":)";
    append_list(out, tokens, [&](const StreamToken& token) {
        std::unordered_set<std::string> seen;
        out += '{';
        const auto add = [&](TokenId id, float logprob) {
            std::string name = key(id);
            if (!seen.insert(name).second) {
                return;
            }
            out += seen.size() > 1 ? "," : "";
            json::append_string(out, name);
            out += ':';
            append_number(out, logprob);
        };
        for (const TokenLogprob& top : token.token.top) {
            add(top.token, top.logprob);
        }
        add(token.token.token, token.token.logprob);
        out += '}';
    });
    out += R"(,"text_offset":)";
    append_list(out, tokens, [&](const StreamToken& token) { append(out, "{}", token.text_offset); });
    out += '}';
}

void ResponseWriter::append_token_ids(std::string& out, const ChoiceText& text) const {
    out += R"(,"token_ids":)";
    append_list(out, text.tokens, [&](const StreamToken& token) { append(out, "{}", token.token.token); });
    if (text.prompt_ids != nullptr) {
        out += R"(,"prompt_token_ids":)";
        append_ids(out, *text.prompt_ids);
    }
}

}  // namespace tessera

// The stream's contract as code, for every test that reads a stream.
#include "server/openai/openai_test_support.h"

namespace tessera {
namespace {

class StreamChecker {
  public:
    StreamChecker(bool chat, bool include_usage) : chat_(chat), include_usage_(include_usage) {}

    void block(std::string_view text) {
        ASSERT_FALSE(done_) << "after [DONE]: " << text;
        if (text.starts_with(':')) {
            EXPECT_EQ(text, ": ping");
            ++out_.pings;
            return;
        }
        ASSERT_TRUE(text.starts_with("data: ")) << text;
        text.remove_prefix(6);
        ASSERT_EQ(text.find('\n'), std::string_view::npos) << "one line an event";
        if (text == "[DONE]") {
            done_ = true;
            return;
        }
        ASSERT_TRUE(out_.error.is_null()) << "after an error only [DONE] may come: " << text;
        auto parsed = json::parse(text);
        ASSERT_TRUE(parsed.ok()) << text;
        if (const json::Value* error = parsed->find("error")) {
            for (const char* key : {"message", "type", "code"}) {
                ASSERT_NE(error->find(key), nullptr) << text;
            }
            out_.error = *error;
            return;
        }
        chunk(*parsed);
    }

    JoinedStream end() {
        EXPECT_TRUE(done_) << "no [DONE]";
        if (out_.error.is_null()) {
            EXPECT_FALSE(out_.choices.empty());
            for (const auto& [index, choice] : out_.choices) {
                EXPECT_FALSE(choice.finish_reason.empty()) << "choice " << index << " has no finish chunk";
            }
            EXPECT_EQ(out_.usage.is_object(), include_usage_);
        }
        return std::move(out_);
    }

  private:
    void chunk(const json::Value& value) {
        ASSERT_TRUE(out_.usage.is_null()) << "after the usage chunk";
        std::string identity;
        for (const char* key : {"id", "object", "created", "model", "system_fingerprint"}) {
            ASSERT_NE(value.find(key), nullptr) << key;
            identity += json::dump(*value.find(key)) + " ";
        }
        EXPECT_EQ(value.find("object")->as_string(), chat_ ? "chat.completion.chunk" : "text_completion");
        if (identity_.empty()) {
            identity_ = identity;
        }
        EXPECT_EQ(identity, identity_);
        const json::Value* choices = value.find("choices");
        ASSERT_TRUE(choices != nullptr && choices->is_array());
        const json::Value* usage = value.find("usage");
        if (choices->items().empty()) {
            ASSERT_TRUE(include_usage_ && usage != nullptr && usage->is_object());
            out_.usage = *usage;
            return;
        }
        ASSERT_EQ(usage != nullptr, include_usage_);
        ASSERT_EQ(choices->items().size(), 1u);
        choice(choices->items().front());
    }

    void choice(const json::Value& value) {
        const int64_t index = value.find("index")->as_int64().value();
        const bool first = !out_.choices.contains(index);
        JoinedChoice& joined = out_.choices[index];
        ASSERT_TRUE(joined.finish_reason.empty()) << "a chunk after the finish chunk of choice " << index;
        const json::Value* reason = value.find("finish_reason");
        ASSERT_TRUE(reason != nullptr && (reason->is_null() || !reason->as_string().empty()));
        if (chat_) {
            delta(*value.find("delta"), first, !reason->is_null(), joined);
        } else {
            joined.content += value.find("text")->as_string();
        }
        if (!reason->is_null()) {
            EXPECT_TRUE(value.find("logprobs")->is_null());
            joined.finish_reason = reason->as_string();
            joined.stop_reason = json::dump(*value.find("stop_reason"));
        }
        if (const json::Value* logprobs = value.find("logprobs"); logprobs->is_object()) {
            add_logprobs(*logprobs, joined);
        }
        if (const json::Value* ids = value.find("token_ids")) {
            for (const json::Value& id : ids->items()) {
                joined.token_ids.push_back(id.as_int64().value());
            }
        }
    }

    void delta(const json::Value& value, bool first, bool last, JoinedChoice& joined) {
        const json::Value* role = value.find("role");
        ASSERT_EQ(role != nullptr, first) << "the role comes in the first chunk, and only there";
        if (first) {
            EXPECT_EQ(role->as_string(), "assistant");
            EXPECT_EQ(value.find("content")->as_string(), "");
            return;
        }
        if (last) {
            EXPECT_TRUE(value.members().empty()) << "a finish chunk with a delta";
            return;
        }
        EXPECT_FALSE(value.members().empty());
        const json::Value* reasoning = value.find("reasoning_content");
        ASSERT_EQ(reasoning != nullptr, value.find("reasoning") != nullptr);
        if (reasoning != nullptr) {
            EXPECT_EQ(value.find("reasoning")->as_string(), reasoning->as_string());
            joined.reasoning += reasoning->as_string();
        }
        if (const json::Value* content = value.find("content")) {
            joined.content += content->as_string();
        }
        if (const json::Value* calls = value.find("tool_calls")) {
            for (const json::Value& call : calls->items()) {
                tool_call(call, joined);
            }
        }
    }

    void tool_call(const json::Value& call, JoinedChoice& joined) {
        const auto index = static_cast<size_t>(call.find("index")->as_int64().value());
        const json::Value* function = call.find("function");
        const json::Value* name = function->find("name");
        const bool first = index == joined.calls.size();
        ASSERT_EQ(name != nullptr, first) << "id, type and name come in a call's first delta";
        ASSERT_EQ(call.find("id") != nullptr && call.find("type") != nullptr, first);
        if (first) {
            EXPECT_TRUE(ids_.insert({call.find("id")->as_string(), 0}).second) << "a tool call's id twice";
            joined.calls.emplace_back(name->as_string(), "");
        }
        ASSERT_EQ(index + 1, joined.calls.size()) << "tool calls out of order";
        joined.calls[index].second += function->find("arguments")->as_string();
    }

    void add_logprobs(const json::Value& logprobs, JoinedChoice& joined) const {
        const json::Value* list = logprobs.find(chat_ ? "content" : "token_logprobs");
        ASSERT_NE(list, nullptr);
        for (const json::Value& entry : list->items()) {
            joined.logprobs.push_back(entry);
        }
    }

    const bool chat_, include_usage_;
    bool done_ = false;
    std::string identity_;
    std::map<std::string, int> ids_;
    JoinedStream out_;
};

}  // namespace

JoinedStream read_stream(const std::string& body, bool chat, bool include_usage) {
    StreamChecker checker(chat, include_usage);
    size_t start = 0;
    while (start < body.size()) {
        const size_t end = body.find("\n\n", start);
        if (end == std::string::npos) {
            ADD_FAILURE() << "an event without its end: " << body.substr(start);
            break;
        }
        checker.block(std::string_view(body).substr(start, end - start));
        start = end + 2;
    }
    return checker.end();
}

}  // namespace tessera

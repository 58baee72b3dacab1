#include "text/hy3_format.h"

#include <gtest/gtest.h>

namespace tessera {
namespace {

Result<std::string> render(const std::string& messages, const std::string& kwargs = "{}") {
    return render_chat({.messages = *json::parse(messages), .tools = {}, .kwargs = *json::parse(kwargs)}, "");
}

TEST(Hy3Format, ErrorsNameThePlace) {
    const auto error = [](const std::string& messages) { return render(messages).status().message(); };
    EXPECT_EQ(error("{}"), "messages: must be a list");
    EXPECT_EQ(error(R"([{"content": "x"}])"), "messages[0]: must be an object with a \"role\"");
    EXPECT_EQ(error(R"([{"role": "user", "content": 3}])"),
              "messages[0].content: must be a text, a list of parts or null, not integer");
    EXPECT_EQ(error(R"([{"role": "system", "content": {}}])"),
              "messages[0].content: must be a text, a list of parts or null, not object");
    EXPECT_EQ(error(R"([{"role": "assistant", "tool_calls": {"a": 1}}])"),
              "messages[0].tool_calls: must be a list");
    EXPECT_EQ(error(R"([{"role": "assistant", "tool_calls": [{}]}])"),
              "messages[0].tool_calls[0].function.name: must be a text");
    EXPECT_EQ(
        error(R"([{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": "[]"}}]}])"),
        "messages[0].tool_calls[0].function.arguments: must be a JSON object");
    EXPECT_FALSE(render_chat({.messages = json::Value::array(), .tools = json::Value(3)}, "").ok());
}

TEST(Hy3Format, EffortsThatAreNoText) {
    EXPECT_EQ(render("[]", R"({"reasoning_effort": true})").status().message(),
              "reasoning_effort error : True, should be no_think/low/high");
    EXPECT_EQ(render("[]", R"({"reasoning_effort": 1.0})").status().message(),
              "reasoning_effort error : 1.0, should be no_think/low/high");
}

TEST(Hy3Format, ArgumentsMayBeAnObjectAlready) {
    const Result<std::string> text = render(
        R"([{"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {"a": [1]}}}]}])");
    ASSERT_TRUE(text.ok()) << text.status().message();
    EXPECT_NE(text->find("<arg_key>a</arg_key>\n<arg_value>[1]</arg_value>\n"), std::string::npos);
}

TEST(OutputStart, IsDecidedByTheLastTurn) {
    const auto start = [](const std::string& prompt) { return output_start(prompt, ":s"); };
    EXPECT_EQ(start("<｜hy_Assistant:s｜><think:s>"), OutputStart::kReasoning);
    EXPECT_EQ(start("<｜hy_Assistant:s｜><think:s>some thoughts"), OutputStart::kReasoning);
    EXPECT_EQ(start("<｜hy_Assistant:s｜><think:s></think:s>"), OutputStart::kContent);
    EXPECT_EQ(start("<｜hy_Assistant:s｜><think:s></think:s>The answer"), OutputStart::kContent);
    EXPECT_EQ(start("<｜hy_User:s｜>what is <think:s>?<｜hy_Assistant:s｜>raw"), OutputStart::kContent);
    EXPECT_EQ(start("<think:s>"), OutputStart::kReasoning);
    EXPECT_EQ(start("<think>"), OutputStart::kContent);
    EXPECT_EQ(start(""), OutputStart::kContent);
}

}  // namespace
}  // namespace tessera

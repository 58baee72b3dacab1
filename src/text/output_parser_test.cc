#include "text/output_parser.h"

#include <algorithm>
#include <gtest/gtest.h>
#include <random>
#include <rapidcheck/gtest.h>

#include "text/parser/parsed_output_testing.h"

namespace tessera {

void PrintTo(const ParsedOutput& out, std::ostream* os) {
    *os << "reasoning=" << out.reasoning << " content=" << out.content;
    for (const auto& [name, arguments] : out.calls) {
        *os << " call " << name << arguments;
    }
}

namespace {

constexpr const char* kTools = R"([
    {"type": "function", "function": {"name": "get", "parameters": {"type": "object", "properties": {
        "city": {"type": "string"}, "days": {"type": "integer"}, "ratio": {"type": "number"},
        "deep": {"type": "object"}, "on": {"type": "boolean"}, "either": {"type": ["string", "array"]}}}}},
    {"type": "function", "function": {"name": "now"}}])";

OutputParserConfig config(const std::string& suffix = ":s", OutputStart start = OutputStart::kContent) {
    return {.suffix = suffix,
            .start = start,
            .parse_reasoning = true,
            .parse_tools = true,
            .tools = *json::parse(kTools)};
}

// "<think>" stands for the tag with the suffix.
std::string tagged(std::string_view text, const std::string& suffix = ":s") {
    std::string out(text);
    for (const char* name : {"think", "tool_calls", "tool_call", "tool_sep", "arg_key", "arg_value"}) {
        for (const std::string& tag : {std::string("<") + name, std::string("</") + name}) {
            for (size_t at = 0; (at = out.find(tag + ">", at)) != std::string::npos; at += tag.size()) {
                out.insert(at + tag.size(), suffix);
            }
        }
    }
    return out;
}

ParsedOutput parse(std::string_view text, OutputStart start = OutputStart::kContent) {
    return parse_output(config(":s", start), tagged(text));
}

TEST(OutputParser, ReasoningThenContent) {
    const ParsedOutput out = parse("a\nb</think>\nc", OutputStart::kReasoning);
    EXPECT_EQ(out.reasoning, "a\nb");
    EXPECT_EQ(out.content, "\nc");
    EXPECT_EQ(parse("<think>a</think>b", OutputStart::kReasoning).reasoning, "a");
    EXPECT_EQ(parse("cut", OutputStart::kReasoning).reasoning, "cut");
    EXPECT_EQ(parse("</think>", OutputStart::kReasoning), ParsedOutput());
    EXPECT_EQ(parse("<thi", OutputStart::kReasoning).reasoning, "<thi");
}

TEST(OutputParser, ContentIsLeftAlone) {
    const std::string text = tagged("a</think><think>b</tool_call><arg_key>");
    EXPECT_EQ(parse_output(config(), text).content, text);
    OutputParserConfig plain = config(":s", OutputStart::kReasoning);
    plain.parse_reasoning = plain.parse_tools = false;
    const std::string calls = tagged("a</think>b<tool_calls>");
    EXPECT_EQ(parse_output(plain, calls).content, calls);
    EXPECT_EQ(parse_output(config(":other"), text).content, text);
}

TEST(OutputParser, Calls) {
    const ParsedOutput out = parse(
        "why</think>Let me look. <tool_calls>\n<tool_call>get<tool_sep>\n<arg_key>city</arg_key>\n"
        "<arg_value>São "
        "\"Paulo\"\n</arg_value>\n<arg_key>days</arg_key>\n<arg_value>3</arg_value>\n</tool_call>\n"
        "<tool_call>now<tool_sep>\n</tool_call>\n</tool_calls>",
        OutputStart::kReasoning);
    EXPECT_EQ(out.reasoning, "why");
    EXPECT_EQ(out.content, "Let me look. ");
    ASSERT_EQ(out.calls.size(), 2u);
    EXPECT_EQ(out.calls[0], (ParsedOutput::Call{"get", R"({"city": "São \"Paulo\"\n", "days": 3})"}));
    EXPECT_EQ(out.calls[1], (ParsedOutput::Call{"now", "{}"}));
}

TEST(OutputParser, CallsEndAnOpenReasoning) {
    const ParsedOutput out =
        parse("hm<tool_calls><tool_call>now<tool_sep></tool_call></tool_calls>", OutputStart::kReasoning);
    EXPECT_EQ(out.reasoning, "hm");
    EXPECT_EQ(out.calls, (std::vector<ParsedOutput::Call>{{"now", "{}"}}));
}

TEST(OutputParser, TextBetweenAndAfterCallsIsDropped) {
    const ParsedOutput out = parse(
        "x<tool_calls>one<tool_call> now <tool_sep>two</tool_call>three</tool_calls>four<tool_calls>"
        "<tool_call>get<tool_sep><arg_key>city</arg_key> five "
        "<arg_value>a</arg_value></tool_call></tool_calls>six");
    EXPECT_EQ(out.content, "x");
    EXPECT_EQ(out.calls, (std::vector<ParsedOutput::Call>{{"now", "{}"}, {"get", R"({"city": "a"})"}}));
}

struct Salvage {
    const char* text;  // after <tool_calls>
    std::vector<ParsedOutput::Call> calls;
};

TEST(OutputParser, SalvagesWhatIsWellFormed) {
    const Salvage cases[] = {
        // Cut off at each place.
        {"<tool_call>ge", {}},
        {"<tool_call>get<tool_sep>", {{"get", "{}"}}},
        {"<tool_call>get<tool_sep><arg_key>ci", {{"get", "{}"}}},
        {"<tool_call>get<tool_sep><arg_key>city</arg_key>", {{"get", "{}"}}},
        {"<tool_call>get<tool_sep><arg_key>city</arg_key><arg_value>Lis", {{"get", R"({"city": "Lis"})"}}},
        {"<tool_call>get<tool_sep><arg_key>days</arg_key><arg_value>12", {{"get", "{}"}}},
        {"<tool_call>get<tool_sep><arg_key>days</arg_key><arg_value>12</arg_value><arg_key>ratio</"
         "arg_key><arg_value>1",
         {{"get", R"({"days": 12})"}}},
        {"<tool_call>get<tool_sep><arg_key>city</arg_key><arg_value>a</arg_val",
         {{"get", R"({"city": "a</arg_val"})"}}},
        // Closed wrongly, or not at all.
        {"<tool_call>now</arg_value></tool_call>", {{"now", "{}"}}},
        {"<tool_call>now</tool_call>", {{"now", "{}"}}},
        {"<tool_call>now</tool_calls>", {{"now", "{}"}}},
        {"<tool_call>get<arg_key>city</arg_key><arg_value>a</arg_value></tool_call>",
         {{"get", R"({"city": "a"})"}}},
        {"<tool_call>get<tool_sep><arg_key>city<arg_value>a</arg_value></tool_call>",
         {{"get", R"({"city": "a"})"}}},
        {"<tool_call>get<tool_sep><arg_key>city</arg_key><arg_value>a</tool_call><tool_call>now<tool_sep></"
         "tool_call>",
         {{"get", R"({"city": "a"})"}, {"now", "{}"}}},
        {"<tool_call>get<tool_sep><arg_key>days</arg_key><arg_value>4<tool_call>now<tool_sep></tool_call>",
         {{"get", R"({"days": 4})"}, {"now", "{}"}}},
        {"<tool_call>now<tool_sep><tool_call>now<tool_sep></tool_calls>", {{"now", "{}"}, {"now", "{}"}}},
        {"<tool_call>x<tool_call>now<tool_sep></tool_call>", {{"now", "{}"}}},
        {"<tool_call> \n<tool_sep></tool_call><tool_call>now<tool_sep></tool_call>", {{"now", "{}"}}},
        // Tags of arguments inside a value are its text.
        {"<tool_call>get<tool_sep><arg_key>city</arg_key><arg_value>a<arg_key>b</arg_key></arg_value></"
         "tool_call>",
         {{"get", R"({"city": "a<arg_key:s>b</arg_key:s>"})"}}},
        {"<tool_call>get<tool_sep><arg_value>a</arg_value></tool_call>", {{"get", "{}"}}},
        {"nothing here</tool_calls>", {}},
    };
    for (const Salvage& salvage : cases) {
        EXPECT_EQ(parse(std::string("<tool_calls>") + salvage.text).calls, salvage.calls) << salvage.text;
    }
}

TEST(OutputParser, ARepeatedKeyIsWrittenAgain) {
    const ParsedOutput out = parse(
        "<tool_calls><tool_call>get<tool_sep><arg_key>days</arg_key><arg_value>1</arg_value><arg_key>days</"
        "arg_key>"
        "<arg_value>2</arg_value></tool_call>");
    ASSERT_EQ(out.calls.size(), 1u);
    EXPECT_EQ(json::parse(out.calls[0].arguments)->find("days")->as_int64(), 2);
}

TEST(OutputParser, NameComesAtTheSeparatorAndStringsStream) {
    OutputParser parser(config());
    EXPECT_TRUE(parser.push(tagged("<tool_calls><tool_call>get")).empty());
    EXPECT_EQ(parser.tool_calls(), 0);
    OutputDelta delta = parser.push(tagged("<tool_sep>"));
    ASSERT_EQ(delta.tool_calls.size(), 1u);
    EXPECT_EQ(delta.tool_calls[0].name, "get");
    EXPECT_EQ(parser.tool_calls(), 1);
    delta = parser.push(tagged("<arg_key>city</arg_key><arg_value>Li"));
    ASSERT_EQ(delta.tool_calls.size(), 1u);
    EXPECT_EQ(delta.tool_calls[0].arguments, R"({"city": "Li)");
    EXPECT_EQ(delta.tool_calls[0].name, "");
    delta = parser.push("s<");
    EXPECT_EQ(delta.tool_calls[0].arguments, "s");
    delta = parser.push(tagged("</arg_value>").substr(1) + tagged("<arg_key>days</arg_key><arg_value>1"));
    EXPECT_EQ(delta.tool_calls[0].arguments, "\"");
    delta = parser.push("2");
    EXPECT_TRUE(delta.empty());
    EXPECT_FALSE(parser.limit_reached());
    delta = parser.push(tagged("</arg_value></tool_call>"));
    EXPECT_EQ(delta.tool_calls[0].arguments, ", \"days\": 12}");
    EXPECT_TRUE(parser.finish().empty());
    EXPECT_TRUE(parser.push("more").empty());
}

TEST(OutputParser, LimitOfCalls) {
    OutputParserConfig one = config();
    one.tool_calls_max = 1;
    OutputParser parser(one);
    ParsedOutput out;
    out.add(parser.push(tagged("<tool_calls><tool_call>now<tool_sep>")));
    EXPECT_FALSE(parser.limit_reached());
    out.add(parser.push(tagged("</tool_call><tool_call>get<tool_sep></tool_call>")));
    EXPECT_TRUE(parser.limit_reached());
    out.add(parser.finish());
    EXPECT_EQ(out.calls, (std::vector<ParsedOutput::Call>{{"now", "{}"}}));
}

constexpr const char* kTexts[] = {
    "Hello < there <tool_calls",
    "think "
    "ü😀</think>text<tool_calls>\n<tool_call>get<tool_sep>\n<arg_key>city</arg_key>\n<arg_value>a<b>\"\\ü😀</"
    "arg_value>\n"
    "<arg_key>days</arg_key>\n<arg_value>-007</arg_value>\n</tool_call>\n<tool_call>now<tool_sep></"
    "tool_call>\n</tool_calls>tail",
    "<think>x</think><tool_calls><tool_call>get<tool_sep><arg_key>deep</arg_key><arg_value>{\"a\": [1, "
    "{}]}</arg_value>"
    "<arg_key>either</arg_key><arg_value>[1",
    "<tool_calls><tool_call>get</arg_value><arg_key>on</arg_key><arg_value>True</tool_call></tool_calls>",
    "a<<</think>\xF0\x9F\x98<tool_calls><tool_call>get<tool_sep><arg_key>city<arg_value>\xC3</arg_value></"
    "tool_call>\xFF",
};

TEST(OutputParser, EveryCutGivesTheSame) {
    for (const char* raw : kTexts) {
        for (const OutputStart start : {OutputStart::kContent, OutputStart::kReasoning}) {
            const std::string text = tagged(raw);
            const ParsedOutput whole = parse_output(config(":s", start), text);
            for (size_t cut = 0; cut <= text.size(); ++cut) {
                ASSERT_EQ(parse_output(config(":s", start), text, {cut}), whole) << text << cut;
            }
        }
    }
}

TEST(OutputParser, EveryTwoCutsGiveTheSame) {
    const OutputParserConfig setup = config("", OutputStart::kReasoning);
    for (const char* raw : kTexts) {
        const ParsedOutput whole = parse_output(setup, raw);
        const std::string_view text(raw);
        for (size_t a = 0; a <= text.size(); ++a) {
            for (size_t b = a; b <= text.size(); ++b) {
                ASSERT_EQ(parse_output(setup, text, {a, b}), whole) << text << a << ' ' << b;
            }
        }
    }
}

// Random sequences of tags and texts, cut anywhere: one result, and the arguments of every call are JSON.
RC_GTEST_PROP(OutputParserProperty, AnyCutsAndAlwaysJson, (uint32_t seed)) {
    constexpr const char* kParts[] = {"<think>",
                                      "</think>",
                                      "<tool_calls>",
                                      "</tool_calls>",
                                      "<tool_call>",
                                      "</tool_call>",
                                      "<tool_sep>",
                                      "<arg_key>",
                                      "</arg_key>",
                                      "<arg_value>",
                                      "</arg_value>",
                                      "get",
                                      "now",
                                      "city",
                                      "days",
                                      "either",
                                      "deep",
                                      "12",
                                      "{\"a\": 1}",
                                      "[",
                                      "\n",
                                      "ü",
                                      "\xF0\x9F",
                                      "<",
                                      "</arg_",
                                      "\"",
                                      "\\",
                                      "true",
                                      "<tool_call>get<tool_sep>",
                                      "<arg_key>city</arg_key><arg_value>",
                                      "<arg_key>days</arg_key><arg_value>",
                                      "</arg_value></tool_call>"};
    std::mt19937 random(seed);
    std::string text = random() % 2 == 0 ? tagged("<tool_calls>") : "";
    for (auto count = random() % 24; count > 0; --count) {
        text += tagged(kParts[random() % std::size(kParts)]);
    }
    const OutputParserConfig setup =
        config(":s", random() % 2 == 0 ? OutputStart::kReasoning : OutputStart::kContent);
    const ParsedOutput whole = parse_output(setup, text);
    for (int round = 0; round < 4; ++round) {
        std::vector<size_t> cuts(random() % 12);
        for (size_t& cut : cuts) {
            cut = random() % (text.size() + 1);
        }
        std::sort(cuts.begin(), cuts.end());
        RC_ASSERT(parse_output(setup, text, cuts) == whole);
    }
    for (const ParsedOutput::Call& call : whole.calls) {
        const Result<json::Value> arguments = json::parse(call.arguments);
        RC_ASSERT(arguments.ok() && arguments->is_object());
    }
}

}  // namespace
}  // namespace tessera

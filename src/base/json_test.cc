#include "base/json.h"

#include <gtest/gtest.h>
#include <limits>

#include "base/utf8.h"

namespace tessera::json {
namespace {

std::string round_trip(std::string_view text) {
    Result<Value> value = parse(text);
    return value.ok() ? dump(*value) : "error: " + value.status().message();
}

TEST(Json, KeepsOrderAndTheLastOfRepeatedKeys) {
    EXPECT_EQ(round_trip(R"({"b":1,"a":2,"b":3})"), R"({"b":3,"a":2})");
    std::string many = "{";
    for (int i = 0; i < 40; ++i) {
        many += "\"k" + std::to_string(i) + "\":" + std::to_string(i) + ",";
    }
    Result<Value> value = parse(many + "\"k3\":99}");
    ASSERT_TRUE(value.ok());
    EXPECT_EQ(value->members().size(), 40u);
    EXPECT_EQ(value->members()[3].second.as_int64(), 99);
}

TEST(Json, NumbersStayExact) {
    EXPECT_EQ(round_trip("123456789012345678901234567890"), "123456789012345678901234567890");
    EXPECT_EQ(round_trip("18446744073709551615"), "18446744073709551615");
    EXPECT_EQ(round_trip("-9223372036854775808"), "-9223372036854775808");
    EXPECT_EQ(round_trip("-0"), "0");
}

TEST(Json, FloatsStayFloats) {
    EXPECT_EQ(round_trip("8.0"), "8.0");
    EXPECT_EQ(round_trip("[0.5,1e300,-0.0]"), "[0.5,1e+300,-0.0]");
    EXPECT_EQ(dump(Value(std::numeric_limits<double>::infinity())), "null");
}

TEST(Json, PythonFloats) {
    const auto python = [](std::string_view text) { return dump_python(*parse(text)); };
    EXPECT_EQ(python("1e5"), "100000.0");
    EXPECT_EQ(python("1e16"), "1e+16");
    EXPECT_EQ(python("0.00001"), "1e-05");
    EXPECT_EQ(python("-0.0"), "-0.0");
    EXPECT_EQ(python("1.5e300"), "1.5e+300");
    EXPECT_EQ(python(R"({"a":[1,2.0],"b":{}})"), R"({"a": [1, 2.0], "b": {}})");
}

TEST(Json, ErrorsDoNotRepeatTheDocument) {
    const std::string many(100'000, 's');
    std::string wide;
    for (int i = 0; i < 1000; ++i) {
        wide += "x\xe2\x82\xac\xf0\x9f\xa6\x8a";
    }
    for (const std::string& text :
         {'"' + many, '"' + many + "\\q\"", '"' + wide + "\\q\"", '"' + wide, '"' + many + "\xff",
          std::string(100'000, '1'), "1e" + std::string(100'000, '9')}) {
        const Result<Value> value = parse(text);
        ASSERT_FALSE(value.ok());
        const std::string message = value.status().message();
        EXPECT_LT(message.size(), 400u);
        EXPECT_TRUE(message.starts_with("invalid JSON at byte ")) << message;
        EXPECT_EQ(message.find("json.exception"), std::string::npos) << message;
        EXPECT_TRUE(text.ends_with('\xff') || utf8_valid(message)) << message;
    }
    EXPECT_EQ(parse("[1e999]").status().message(), "invalid JSON at byte 6: number overflow parsing '1e999'");
}

TEST(Json, RejectsWhatIsNotJson) {
    for (const char* text :
         {"", "{", "[1,]", "NaN", "{\"a\":1}x", "\"\\ud800\"", "\"\xff\"", "01", "1e999", "nul"}) {
        EXPECT_FALSE(parse(text).ok()) << text;
    }
    const std::string deep(65, '[');
    Result<Value> value = parse(deep + std::string(65, ']'));
    ASSERT_FALSE(value.ok());
    EXPECT_NE(value.status().message().find("64"), std::string::npos);
    EXPECT_TRUE(parse(std::string(64, '[') + std::string(64, ']')).ok());
}

TEST(Json, WritesStringsSafely) {
    std::string out;
    append_string(out, std::string_view("a\"\\\n\x01\xE2\x82\xAC\xff", 9));
    EXPECT_EQ(out, "\"a\\\"\\\\\\n\\u0001\xE2\x82\xAC\xEF\xBF\xBD\"");
}

TEST(Utf8, OneReplacementForEachMaximalSubpart) {
    EXPECT_EQ(utf8_replace_invalid("\xE2\x82"), kReplacementCharacter);
    EXPECT_EQ(utf8_replace_invalid("\xF0\x80\x80"), "\xEF\xBF\xBD\xEF\xBF\xBD\xEF\xBF\xBD");
    EXPECT_EQ(utf8_incomplete_tail("ab\xE2\x82"), 2u);
    EXPECT_EQ(utf8_incomplete_tail("ab\xE2\x82\xAC"), 0u);
    EXPECT_EQ(utf8_incomplete_tail("\xF0\x9F\x98"), 3u);
}

TEST(Utf8, ATerminalSeesNoControlCharacters) {
    const std::string kept = "a\tb\n\u00e9 \U0001f600 \u00a0";
    EXPECT_EQ(utf8_for_terminal(kept), kept);
    EXPECT_EQ(utf8_for_terminal("\x1b[31mred\x07\r"), "<U+001B>[31mred<U+0007><U+000D>");
    EXPECT_EQ(utf8_for_terminal(std::string_view("a\0b", 3)), "a<U+0000>b");
    EXPECT_EQ(utf8_for_terminal("\u009b31m\x7f"), "<U+009B>31m<U+007F>");  // C1's CSI
    EXPECT_EQ(utf8_for_terminal("\x9b"
                                "a"),
              "\xEF\xBF\xBD"
              "a");
}

}  // namespace
}  // namespace tessera::json

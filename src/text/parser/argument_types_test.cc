#include "text/parser/argument_types.h"

#include <gtest/gtest.h>

namespace tessera {
namespace {

std::string typed(const std::string& schema, std::string_view text, const std::string& defs = "{}") {
    const Result<json::Value> tools =
        json::parse(R"([{"type": "function", "function": {"name": "f", "parameters": {"$defs": )" + defs +
                    R"(, "properties": {"a": )" + schema + "}}}}]");
    EXPECT_TRUE(tools.ok()) << tools.status().message();
    return argument_json(argument_types(*tools, "f", "a"), text);
}

struct Case {
    const char* schema;
    const char* text;
    const char* json;
};

TEST(ArgumentTypes, OneType) {
    const Case cases[] = {
        {R"({"type": "string"})", "12", "\"12\""},
        {R"({"type": "string"})", " a\n\"", "\" a\\n\\\"\""},
        {R"({"type": "integer"})", "12", "12"},
        {R"({"type": "integer"})", " -007\n", "-7"},
        {R"({"type": "integer"})", "+5", "5"},
        {R"({"type": "integer"})", "-0", "0"},
        {R"({"type": "integer"})", "1_000", "1000"},
        {R"({"type": "integer"})", "1__0", "\"1__0\""},
        {R"({"type": "integer"})", "123456789012345678901234567890", "123456789012345678901234567890"},
        {R"({"type": "integer"})", "1.5", "1.5"},
        {R"({"type": "integer"})", "many", "\"many\""},
        {R"({"type": "number"})", "5", "5"},
        {R"({"type": "number"})", "5.0", "5.0"},
        {R"({"type": "number"})", "1e3", "1000.0"},
        {R"({"type": "number"})", ".5", "0.5"},
        {R"({"type": "number"})", "1e999", "\"1e999\""},
        {R"({"type": "number"})", "nan", "\"nan\""},
        {R"({"type": "boolean"})", "True", "true"},
        {R"({"type": "boolean"})", "false", "false"},
        {R"({"type": "boolean"})", "yes", "\"yes\""},
        {R"({"type": "boolean"})", "null", "null"},
        {R"({"type": "array"})", "[1,\"ü\"]", "[1, \"ü\"]"},
        {R"({"type": "array"})", "[1,", "\"[1,\""},
        {R"({"type": "object"})", "{\"b\":{\"a\":1.0}}", "{\"b\": {\"a\": 1.0}}"},
        {R"({"type": "null"})", "null", "null"},
        {R"({"type": "date"})", "2024", "2024"},
        {R"({"type": "date"})", "May 1", "\"May 1\""},
    };
    for (const Case& c : cases) {
        EXPECT_EQ(typed(c.schema, c.text), c.json) << c.schema << c.text;
    }
}

TEST(ArgumentTypes, Aliases) {
    for (const char* name : {"int", "int32", "uint8", "long", "Integer", "short", "unsigned int"}) {
        EXPECT_EQ(typed(std::string(R"({"type": ")") + name + "\"}", "1_0"), "10") << name;
    }
    for (const char* name : {"num", "float", "float64", "double", "NUMBER"}) {
        EXPECT_EQ(typed(std::string(R"({"type": ")") + name + "\"}", "1."), "1.0") << name;
    }
    for (const char* name : {"str", "text", "enum", "varchar", "char"}) {
        EXPECT_EQ(typed(std::string(R"({"type": ")") + name + "\"}", "1"), "\"1\"") << name;
    }
    for (const char* name : {"list", "dict", "map"}) {
        EXPECT_EQ(typed(std::string(R"({"type": ")") + name + "\"}", "[{}]"), "[{}]") << name;
    }
    EXPECT_EQ(typed(R"({"type": "bool"})", "TRUE"), "true");
}

TEST(ArgumentTypes, Unions) {
    const Case cases[] = {
        {R"({"type": ["string", "array"]})", "[1]", "[1]"},
        {R"({"type": ["string", "array"]})", "12", "\"12\""},
        {R"({"type": ["string", "array"]})", "\"q\"", "\"\\\"q\\\"\""},
        {R"({"type": ["string", "null"]})", "null", "\"null\""},
        {R"({"type": ["integer", "null"]})", "null", "null"},
        {R"({"type": ["integer", "string"]})", "12", "12"},
        {R"({"type": ["integer", "string"]})", "1.5", "\"1.5\""},
        {R"({"type": ["boolean", "integer"]})", "true", "true"},
        {R"({"anyOf": [{"type": "integer"}, {"type": "null"}]})", "3", "3"},
        {R"({"oneOf": [{"type": "number"}, {"type": "string"}]})", "3.5", "3.5"},
        {R"({"oneOf": [{"type": "number"}, {"type": "string"}]})", "x", "\"x\""},
        {R"({"anyOf": [{"anyOf": [{"type": "integer"}]}, {}]})", "x", "\"x\""},
        {R"({"allOf": [{"description": "d"}, {"type": "integer"}]})", "3", "3"},
        {R"({"allOf": [{"description": "d"}]})", "3", "\"3\""},
        {R"({"enum": ["1", "2"]})", "1", "\"1\""},
        {R"({"enum": [1, 2, null]})", "1", "1"},
        {R"({"const": 7})", "7", "7"},
        {R"({})", "1", "\"1\""},
        {"true", "1", "\"1\""},
    };
    for (const Case& c : cases) {
        EXPECT_EQ(typed(c.schema, c.text), c.json) << c.schema << c.text;
    }
}

TEST(ArgumentTypes, References) {
    EXPECT_EQ(typed(R"({"$ref": "#/$defs/N"})", "3", R"({"N": {"type": "integer"}})"), "3");
    EXPECT_EQ(typed(R"({"$ref": "#/$defs/Missing"})", "3"), "\"3\"");
    EXPECT_EQ(typed(R"({"$ref": "other.json"})", "3"), "\"3\"");
    EXPECT_EQ(typed(R"({"$ref": "#/$defs/N"})", "3", R"({"N": {"$ref": "#/$defs/N"}})"), "\"3\"");
}

TEST(ArgumentTypes, WhatNoToolDescribesIsAString) {
    const json::Value tools =
        *json::parse(R"([{"type": "function", "function": {"name": "f"}}, 3, {"function": 4}])");
    EXPECT_TRUE(argument_types(tools, "f", "a").only_string());
    EXPECT_TRUE(argument_types(tools, "g", "a").only_string());
    EXPECT_TRUE(argument_types(json::Value(), "f", "a").only_string());
}

}  // namespace
}  // namespace tessera

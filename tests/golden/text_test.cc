// Tokenizer and conversation format against the reference outputs of tests/golden/data.
#include <fstream>
#include <gtest/gtest.h>
#include <string>
#include <vector>

#include "base/json.h"
#include "text/detokenizer.h"
#include "text/hy3_format.h"
#include "text/tokenizer.h"

namespace tessera {
namespace {

constexpr const char* kData = TESSERA_SOURCE_DIR "/tests/golden/data/";
constexpr const char* kModel = TESSERA_SOURCE_DIR "/models/demo";

std::vector<json::Value> read_lines(const std::string& name) {
    std::ifstream file(kData + name);
    std::vector<json::Value> lines;
    for (std::string line; std::getline(file, line);) {
        Result<json::Value> value = json::parse(line);
        EXPECT_TRUE(value.ok()) << value.status().message();
        lines.push_back(value.take());
    }
    return lines;
}

std::string text_at(const json::Value& line, std::string_view key) {
    const json::Value* value = line.find(key);
    return value == nullptr ? "(none)" : value->as_string();
}

std::vector<TokenId> ids_of(const json::Value& line) {
    std::vector<TokenId> ids;
    for (const json::Value& id : line.find("ids")->items()) {
        ids.push_back(static_cast<TokenId>(*id.as_int64()));
    }
    return ids;
}

std::string detokenized(const Tokenizer& tokenizer, const std::vector<TokenId>& ids, bool skip_special) {
    Detokenizer detokenizer(tokenizer, skip_special);
    std::string text;
    for (const TokenId id : ids) {
        text += detokenizer.push(id);
    }
    return text + detokenizer.flush();
}

TEST(TextGolden, Tokenizer) {
    const Result<std::unique_ptr<Tokenizer>> loaded = Tokenizer::load(kModel);
    ASSERT_TRUE(loaded.ok()) << loaded.status().message();
    const Tokenizer& tokenizer = **loaded;
    const std::vector<json::Value> lines = read_lines("tokenizer.jsonl");
    EXPECT_EQ(lines.size(), 661u);
    for (const json::Value& line : lines) {
        const std::vector<TokenId> ids = ids_of(line);
        if (text_at(line, "kind") == "encode") {
            const Result<std::vector<TokenId>> encoded = tokenizer.encode(text_at(line, "text"));
            ASSERT_TRUE(encoded.ok()) << encoded.status().message();
            EXPECT_EQ(*encoded, ids) << text_at(line, "text");
        }
        for (const bool skip : {false, true}) {
            const std::string expected = text_at(line, skip ? "decoded_skip_special" : "decoded");
            EXPECT_EQ(tokenizer.decode(ids, skip), expected);
            EXPECT_EQ(detokenized(tokenizer, ids, skip), expected);
        }
    }
}

TEST(TextGolden, Template) {
    const std::vector<json::Value> lines = read_lines("template.jsonl");
    EXPECT_EQ(lines.size(), 183u);
    for (const json::Value& line : lines) {
        const ChatInput input{
            .messages = *line.find("messages"), .tools = *line.find("tools"), .kwargs = *line.find("kwargs")};
        const Result<std::string> text = render_chat(input, text_at(line, "suffix"));
        if (text.ok()) {
            EXPECT_EQ(*text, text_at(line, "text")) << text_at(line, "name");
        } else {
            EXPECT_EQ(text.status().message(), text_at(line, "error")) << text_at(line, "name");
        }
    }
}

}  // namespace
}  // namespace tessera

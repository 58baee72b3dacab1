#include "text/tokenizer.h"

#include <chrono>
#include <filesystem>
#include <fstream>
#include <gtest/gtest.h>
#include <string>
#include <sys/stat.h>
#include <unistd.h>
#include <vector>

#include "base/json.h"
#include "base/utf8.h"
#include "text/bpe/byte_level.h"

namespace tessera {
namespace {

using Ids = std::vector<TokenId>;

// A tokenizer.json over the byte alphabet (ids 0 to 255 are the bytes themselves), with parts to replace.
struct File {
    json::Value vocab = json::Value::object();
    json::Value merges = json::Value::array();
    json::Value added = json::Value::array();
    json::Value normalizer, pre_tokenizer;
    json::Value extra = json::Value::object();  // more fields of the model

    File() {
        for (int byte = 0; byte < 256; ++byte) {
            std::string content;
            utf8_append(content, bpe::byte_to_char(static_cast<unsigned char>(byte)));
            vocab.set(content, byte);
        }
        pre_tokenizer =
            *json::parse(R"({"type": "ByteLevel", "add_prefix_space": false, "use_regex": false})");
    }

    File& token(const std::string& content) {
        vocab.set(content, static_cast<int>(vocab.members().size()));
        return *this;
    }
    File& merge(const std::string& left, const std::string& right) {
        merges.push_back(json::Value::array({left, right}));
        return token(left + right);
    }
    File& add(const std::string& content, int id, const std::string& options = "{}") {
        json::Value token = *json::parse(options);
        token.set("id", id);
        token.set("content", content);
        added.push_back(std::move(token));
        return *this;
    }
    File& pre(const std::string& spec) {
        pre_tokenizer = *json::parse(spec);
        return *this;
    }
    // Splits, then ByteLevel.
    File& split(const std::string& pattern, const std::string& behavior, bool invert = false) {
        return pre(R"({"type": "Sequence", "pretokenizers": [{"type": "Split", "pattern": )" + pattern +
                   R"(, "behavior": ")" + behavior + R"(", "invert": )" + (invert ? "true" : "false") +
                   R"(}, {"type": "ByteLevel", "add_prefix_space": false, "use_regex": false}]})");
    }

    std::string text() const {
        json::Value model = json::Value::object({{"type", "BPE"}, {"vocab", vocab}, {"merges", merges}});
        for (const auto& [key, value] : extra.members()) {
            model.set(key, value);
        }
        return json::dump(json::Value::object({{"added_tokens", added},
                                               {"normalizer", normalizer},
                                               {"pre_tokenizer", pre_tokenizer},
                                               {"decoder", *json::parse(R"({"type": "ByteLevel"})")},
                                               {"model", model}}));
    }
    std::unique_ptr<Tokenizer> load(std::string_view config = "{}") const {
        Result<std::unique_ptr<Tokenizer>> loaded = Tokenizer::parse(text(), config);
        EXPECT_TRUE(loaded.ok()) << loaded.status().message();
        return loaded.ok() ? loaded.take() : nullptr;
    }
    std::string error() const {
        const Result<std::unique_ptr<Tokenizer>> loaded = Tokenizer::parse(text(), "{}");
        EXPECT_FALSE(loaded.ok());
        return loaded.ok() ? std::string() : loaded.status().message();
    }
};

Ids encode(const Tokenizer& tokenizer, std::string_view text) {
    const Result<Ids> ids = tokenizer.encode(text);
    EXPECT_TRUE(ids.ok()) << ids.status().message();
    return ids.ok() ? *ids : Ids();
}

TEST(Tokenizer, MergesByRankThenLeftmost) {
    const auto t = File().merge("a", "a").merge("b", "c").merge("a", "b").load();
    EXPECT_EQ(encode(*t, "aaa"), (Ids{256, 'a'}));
    EXPECT_EQ(encode(*t, "abc"), (Ids{'a', 257}));
    EXPECT_EQ(encode(*t, "ab"), (Ids{258}));
    EXPECT_EQ(encode(*t, ""), Ids());
}

TEST(Tokenizer, ShortAndLongPiecesMergeAlike) {
    File file;
    file.merge("a", "b").merge("ab", "ab").merge("b", "a").merge("abab", "a");
    const auto t = file.load();
    std::string text;
    for (int i = 0; i < 40; ++i) {
        text += i % 3 == 0 ? "ab" : "ba";
    }
    // Once as a piece longer than the short path takes, once in pieces that it takes.
    const auto split = file.split(R"({"String": "!"})", "Removed").load();
    const Ids whole = encode(*t, text);
    EXPECT_EQ(t->decode(whole, false), text);
    const Ids once = encode(*split, text.substr(0, 40));
    const Ids padded = encode(*split, text.substr(0, 40) + "!" + std::string(100, 'z'));
    EXPECT_TRUE(std::equal(once.begin(), once.end(), padded.begin()));
    EXPECT_LT(whole.size(), text.size());
}

TEST(Tokenizer, MergesAsText) {
    File file;
    file.merge("a", "b");
    file.merges = *json::parse(R"(["a b"])");
    EXPECT_EQ(encode(*file.load(), "ab"), (Ids{256}));
}

TEST(Tokenizer, IgnoreMergesTakesWholePieces) {
    File file;
    file.token("abc");
    EXPECT_EQ(encode(*file.load(), "abc"), (Ids{'a', 'b', 'c'}));
    file.extra.set("ignore_merges", true);
    EXPECT_EQ(encode(*file.load(), "abc"), (Ids{256}));
}

TEST(Tokenizer, BytesWithoutATokenAreUnknownOrDropped) {
    File file;
    file.vocab = *json::parse(R"({"a": 0, "?": 1})");
    EXPECT_EQ(encode(*file.load(), "abba"), (Ids{0, 0}));
    file.extra.set("unk_token", "?");
    EXPECT_EQ(encode(*file.load(), "abba"), (Ids{0, 1, 1, 0}));
    file.extra.set("fuse_unk", true);
    EXPECT_EQ(encode(*file.load(), "abba"), (Ids{0, 1, 0}));
}

TEST(Tokenizer, AddedTokensLeftmostLongest) {
    const auto t = File().add("<t", 300).add("<think>", 301, R"({"special": true})").add("k>", 302).load();
    EXPECT_EQ(encode(*t, "x<think>y"), (Ids{'x', 301, 'y'}));
    EXPECT_EQ(encode(*t, "<thin<think><tk>"), (Ids{300, 'h', 'i', 'n', 301, 300, 302}));
    EXPECT_EQ(*t->encode_plain("<think>"), (Ids{'<', 't', 'h', 'i', 'n', 'k', '>'}));
    EXPECT_EQ(t->added_token("<think>"), 301);
    EXPECT_EQ(t->added_token("think"), std::nullopt);
    EXPECT_TRUE(t->is_special(301));
    EXPECT_FALSE(t->is_special(300));
    EXPECT_FALSE(t->is_special(1 << 20));
    EXPECT_EQ(t->size(), 303);
    EXPECT_EQ(t->token_bytes(299), "");  // a gap
    EXPECT_EQ(t->decode(Ids{'x', 301, 299, -1, 9999, 300}, false), "x<think><t");
    EXPECT_EQ(t->decode(Ids{'x', 301, 300}, true), "x<t");
}

TEST(Tokenizer, AddedTokenOptions) {
    const auto t = File()
                       .add("<l>", 300, R"({"lstrip": true})")
                       .add("<r>", 301, R"({"rstrip": true})")
                       .add("word", 302, R"({"single_word": true})")
                       .load();
    EXPECT_EQ(encode(*t, "a \n<l> b"), (Ids{'a', 300, ' ', 'b'}));
    EXPECT_EQ(encode(*t, "a <r>\u3000 b"), (Ids{'a', ' ', 301, 'b'}));
    EXPECT_EQ(encode(*t, "<r> <l>"), (Ids{301, 300}));
    EXPECT_EQ(encode(*t, "word,word"), (Ids{302, ',', 302}));
    EXPECT_EQ(encode(*t, "words"), (Ids{'w', 'o', 'r', 'd', 's'}));
}

TEST(Tokenizer, NormalizedAddedTokensAreFoundAfterNormalisation) {
    File file;
    file.add("<X>", 300, R"({"normalized": true})").add("<Y>", 301);
    file.normalizer = *json::parse(R"({"type": "Lowercase"})");
    const auto t = file.load();
    EXPECT_EQ(encode(*t, "<X><x><Y><y>B"), (Ids{300, 300, 301, '<', 'y', '>', 'b'}));
}

TEST(Tokenizer, Normalizers) {
    const auto normalised = [](const std::string& spec, std::string_view text) {
        File file;
        file.normalizer = *json::parse(spec);
        const auto t = file.load();
        return t->decode(encode(*t, text), false);
    };
    EXPECT_EQ(normalised(R"({"type": "NFC"})", "e\u0301\u2126"), "\u00e9\u03a9");
    EXPECT_EQ(normalised(R"({"type": "NFD"})", "\u00e9"), "e\u0301");
    EXPECT_EQ(normalised(R"({"type": "NFKC"})", "\ufb01\u2460"), "fi1");
    EXPECT_EQ(normalised(R"({"type": "NFKD"})", "\u00e9\u00bd"), "e\u03011\u20442");
    EXPECT_EQ(normalised(R"({"type": "Lowercase"})", "\u0130\u00c9\u03a3"), "i\u0307\u00e9\u03c3");
    EXPECT_EQ(normalised(R"({"type": "Strip", "strip_left": true, "strip_right": false})", " \u3000a "),
              "a ");
    EXPECT_EQ(normalised(R"({"type": "Strip"})", " \t "), "");
    EXPECT_EQ(normalised(R"({"type": "Prepend", "prepend": "_"})", "a"), "_a");
    EXPECT_EQ(normalised(R"({"type": "Sequence", "normalizers": [
        {"type": "Replace", "pattern": {"Regex": "\\s+"}, "content": "_"},
        {"type": "Replace", "pattern": {"String": "."}, "content": "!!"}]})",
                         "a \u1680b.c\u180e"),
              "a_b!!c\u180e");
}

TEST(Tokenizer, SplitBehaviors) {
    const auto pieces = [](const std::string& behavior, bool invert) {
        // Every pair merges, so that each piece of "a--b-c" shows as the longest token that it can be.
        File file;
        file.merge("-", "-").merge("a", "--").merge("--", "b").merge("b", "-").merge("-", "c");
        const auto t = file.split(R"({"String": "-"})", behavior, invert).load();
        std::string shown;
        for (const TokenId id : encode(*t, "a--b-c")) {
            shown += (shown.empty() ? "" : " ") + std::string(t->token_bytes(id));
        }
        return shown;
    };
    EXPECT_EQ(pieces("Isolated", false), "a - - b - c");
    EXPECT_EQ(pieces("Removed", false), "a b c");
    EXPECT_EQ(pieces("Removed", true), "- - -");
    EXPECT_EQ(pieces("Contiguous", false), "a -- b - c");
    EXPECT_EQ(pieces("MergedWithPrevious", false), "a - - b- c");
    EXPECT_EQ(pieces("MergedWithNext", false), "a - - b -c");
}

TEST(Tokenizer, ByteLevelPrefixSpaceAndRegex) {
    const auto t = File().merge("a", "b").merge("\u0120", "ab").pre(R"({"type": "ByteLevel"})").load();
    EXPECT_EQ(encode(*t, "ab ab"), (Ids{257, 257}));
    EXPECT_EQ(encode(*t, " ab"), (Ids{257}));
    EXPECT_EQ(encode(*t, ""), Ids());
}

TEST(Tokenizer, InvalidInputBecomesReplacementCharacters) {
    const auto t = File().load();
    EXPECT_EQ(encode(*t, "a\xF0\x9F\x98z\xFF"), encode(*t, "a\uFFFDz\uFFFD"));
    EXPECT_EQ(t->decode(Ids{0xF0, 0x9F, 0x98, 'z', 0xFF, 0xC3, 0xA9}, false), "\uFFFDz\uFFFD\u00e9");
}

TEST(Tokenizer, Suffix) {
    EXPECT_EQ(File().load(R"({"token_suffix": ":x"})")->token_suffix(), ":x");
    EXPECT_EQ(File().add("<thinking>", 300).add("<think:os>", 301).load()->token_suffix(), ":os");
    EXPECT_EQ(File().add("<think>", 300).add("<tool_calls:no>", 301).load()->token_suffix(), "");
    EXPECT_EQ(File().add("<tool_calls:y>", 300).load()->token_suffix(), ":y");
    EXPECT_EQ(File().load("")->token_suffix(), "");
}

TEST(Tokenizer, LoadErrorsNameWhatIsWrong) {
    const auto expect = [](const File& file, std::string_view part) {
        EXPECT_NE(file.error().find(part), std::string::npos) << file.error();
    };
    File file;
    file.normalizer = *json::parse(R"({"type": "Nmt"})");
    expect(file, "normalizer: type \"Nmt\"");
    expect(File().pre(R"({"type": "Metaspace"})"), "pre_tokenizer: type \"Metaspace\"");
    expect(File().pre(R"({"type": "Sequence", "pretokenizers": []})"), "must end in ByteLevel");
    expect(File().split(R"({"Regex": "(a"})", "Isolated"), "(a");
    expect(File().split(R"({"Regex": "[a[b]]"})", "Isolated"), "a class inside a class");
    expect(File().split(R"({"String": "a"})", "Sideways"), "Sideways");
    expect(File().add("<a>", -1), "added_tokens[0]");
    expect(File().add("<a>", 300).add("<a>", 301), "added_tokens[1]");
    expect(File().add("<a>", 97), "id 97 belongs to two tokens");
    expect(File().add("a", 300), "has id 300 here and 97 in the vocabulary");
    expect(File().add("<a>", 1 << 30), "added_tokens[0]");
    file = File();
    file.merges = *json::parse(R"([["a", "b"]])");
    expect(file, "merges[0]");
    file.merges = *json::parse(R"(["a b c"])");
    expect(file, "merges[0]");
    file = File();
    file.extra.set("type", "Unigram");
    expect(file, "Unigram");
    file = File();
    file.vocab = *json::parse(R"({"a": 0, "b": 0})");
    expect(file, "id 0 belongs to two tokens");
    for (const char* text :
         {"", "[]", "{", "{\"model\": 1, \"decoder\": {\"type\": \"ByteLevel\"}}", "null"}) {
        EXPECT_FALSE(Tokenizer::parse(text, "{}").ok()) << text;
    }
    EXPECT_FALSE(Tokenizer::parse(File().text(), "{").ok());
    EXPECT_EQ(Tokenizer::load("/nowhere").status().code(), StatusCode::kNotFound);
}

// The whole path, once, and no wait for the other end of a pipe.
TEST(Tokenizer, FilesThatCannotBeUsedAreNamed) {
    const std::filesystem::path folder =
        std::filesystem::temp_directory_path() / ("tokenizer_files_" + std::to_string(::getpid()));
    std::filesystem::create_directories(folder);
    const std::string path = folder / "tokenizer.json";
    const auto message = [&] { return Tokenizer::load(folder).status().message(); };
    ASSERT_EQ(::mkfifo(path.c_str(), 0600), 0);
    EXPECT_EQ(message(), path + ": is no regular file");
    std::filesystem::remove(path);
    std::filesystem::create_directory(path);
    EXPECT_EQ(message(), path + ": is no regular file");
    std::filesystem::remove(path);
    File file;
    file.vocab = *json::parse(R"({"a": 0, "b": -1})");
    std::ofstream(path) << file.text();
    EXPECT_EQ(message(), path + ": model: vocab: token \"b\": its id must be an integer from 0 to 16777216");
    std::ofstream(path) << File().text();
    EXPECT_EQ(message(), "");
    const std::string config = folder / "tokenizer_config.json";
    ASSERT_EQ(::mkfifo(config.c_str(), 0600), 0);
    EXPECT_EQ(message(), config + ": is no regular file");
    std::filesystem::remove_all(folder);
}

// A regex that backtracks without end costs an error.
TEST(Tokenizer, RunawayRegexIsAnError) {
    const auto t = File().split(R"({"Regex": "(?:a+)+[bc]"})", "Isolated").load();
    const Result<Ids> ids = t->encode(std::string(64, 'a'));
    ASSERT_FALSE(ids.ok());
    EXPECT_EQ(ids.status().code(), StatusCode::kResourceExhausted);
}

// The aim is 2 s for each; the bound leaves room for a slow machine.
TEST(Tokenizer, AMegabyteOfOneThing) {
    const Result<std::unique_ptr<Tokenizer>> t = Tokenizer::load(TESSERA_SOURCE_DIR "/models/demo");
    ASSERT_TRUE(t.ok()) << t.status().message();
    for (const std::string unit : {"a", " ", "\u0301", "\n", "<", " \n", "7", "\xFF"}) {
        std::string text;
        while (text.size() < size_t{1} << 20) {
            text += unit;
        }
        const auto start = std::chrono::steady_clock::now();
        const Ids ids = encode(**t, text);
        EXPECT_LT(std::chrono::steady_clock::now() - start, std::chrono::seconds(20)) << unit;
        EXPECT_EQ((*t)->decode(ids, false), utf8_replace_invalid(text));
    }
}

}  // namespace
}  // namespace tessera

#include "text/bpe/regex.h"

#include <gtest/gtest.h>
#include <vector>

namespace tessera::bpe {
namespace {

std::vector<std::string> matches(std::string_view pattern, std::string_view subject) {
    const Result<Regex> regex = Regex::compile(pattern);
    EXPECT_TRUE(regex.ok()) << regex.status().message();
    std::vector<std::string> found;
    RegexScratch scratch;
    RegexIterator iterator(*regex, subject, scratch);
    for (Span match; iterator.next(match) == Regex::Outcome::kMatch;) {
        found.emplace_back(subject.substr(match.begin, match.end - match.begin));
    }
    return found;
}

using Texts = std::vector<std::string>;

TEST(Regex, WhiteSpaceIsUnicodes) {
    EXPECT_EQ(matches("\\s", "a\u0085\u180e\u3000"), (Texts{"\u0085", "\u3000"}));
    EXPECT_EQ(matches("\\S", "\u0085\u180e\u3000x"), (Texts{"\u180e", "x"}));
    EXPECT_EQ(matches("[\\s1]+", "1\u2003 2\u180e"), (Texts{"1\u2003 "}));
    EXPECT_EQ(matches("[^\\sx]", "\u180ex "), (Texts{"\u180e"}));
    EXPECT_EQ(matches("[\\S]", " \u180e"), (Texts{"\u180e"}));
    EXPECT_EQ(matches("[^\\S]", " \u180e"), (Texts{" "}));
    EXPECT_EQ(matches("[[:space:]]", "\u180e\u00a0"), (Texts{"\u00a0"}));
}

TEST(Regex, WordsHaveMarksAndConnectors) {
    EXPECT_EQ(matches("\\w+", "e\u0301_\u203f!\u2160"), (Texts{"e\u0301_\u203f", "\u2160"}));
    EXPECT_EQ(matches("\\W", "a\u0301-"), (Texts{"-"}));
    EXPECT_EQ(matches("\\bb", "ab b"), (Texts{"b"}));
    EXPECT_EQ(matches("\\h+", "0aFg"), (Texts{"0aF"}));
}

TEST(Regex, ScriptsNotScriptExtensions) {
    // U+30FC extends both kana scripts and belongs to neither.
    EXPECT_EQ(matches("\\p{Katakana}+", "\u30ab\u30fc"), (Texts{"\u30ab"}));
    EXPECT_EQ(matches("\\p{^Han}", "\u4e00x"), (Texts{"x"}));
    EXPECT_EQ(matches("\\p{Lu}\\p{Ll}*", "Ab\u00c9"), (Texts{"Ab", "\u00c9"}));
}

TEST(Regex, EmptyMatches) {
    EXPECT_EQ(matches("a*", "baac"), (Texts{"", "aa", ""}));
    EXPECT_EQ(matches("x*", "\u00e9"), (Texts{"", ""}));
    EXPECT_EQ(matches("^.|.$", "ab\ncd"), (Texts{"a", "b", "c", "d"}));
}

TEST(Regex, BracketsInClasses) {
    EXPECT_EQ(matches("[]a]+", "]a["), (Texts{"]a"}));
    EXPECT_EQ(matches("[\\[\\]]+", "x[]"), (Texts{"[]"}));
}

TEST(Regex, WhatDiffersIsRefused) {
    for (const char* pattern : {"[a[b]]", "[a&&b]", "[\\W]", "(?m)a", "(?im:a)", "[[:alpha:]]", "[a"}) {
        const Result<Regex> regex = Regex::compile(pattern);
        ASSERT_FALSE(regex.ok()) << pattern;
        EXPECT_EQ(regex.status().code(), StatusCode::kUnimplemented);
    }
    EXPECT_EQ(Regex::compile("(a").status().code(), StatusCode::kInvalidArgument);
}

TEST(Regex, LiteralsHaveNoMeaning) {
    const Result<Regex> regex = Regex::literal("a.b");
    ASSERT_TRUE(regex.ok());
    RegexScratch scratch;
    Span match;
    EXPECT_EQ(regex->search("axb a.b", 0, scratch, match), Regex::Outcome::kMatch);
    EXPECT_EQ(match, (Span{4, 7}));
    EXPECT_EQ(regex->search("axb a.b", 5, scratch, match), Regex::Outcome::kNone);
}

}  // namespace
}  // namespace tessera::bpe

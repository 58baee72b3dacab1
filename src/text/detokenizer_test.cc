#include "text/detokenizer.h"

#include <algorithm>
#include <gtest/gtest.h>
#include <random>
#include <rapidcheck/gtest.h>

#include "base/utf8.h"

namespace tessera {
namespace {

const Tokenizer& demo() {
    static const std::unique_ptr<Tokenizer> tokenizer =
        Tokenizer::load(TESSERA_SOURCE_DIR "/models/demo").take();
    return *tokenizer;
}

RC_GTEST_PROP(DetokenizerProperty, ConcatenationIsDecode, (uint32_t seed, bool skip_special)) {
    std::mt19937 random(seed);
    std::vector<TokenId> ids(random() % 40);
    for (TokenId& id : ids) {
        // Mostly single bytes, so that many sequences are broken; some ids have no token.
        const auto kind = random() % 4;
        id = static_cast<TokenId>(kind < 2 ? random() % 256 : random() % 4100);
    }
    Detokenizer detokenizer(demo(), skip_special);
    std::string text;
    for (const TokenId id : ids) {
        const std::string piece = detokenizer.push(id);
        RC_ASSERT(utf8_valid(piece));
        text += piece;
    }
    text += detokenizer.flush();
    RC_ASSERT(text == demo().decode(ids, skip_special));
    RC_ASSERT(detokenizer.flush().empty());
}

// The earliest end, and of those the longest: by trying every end and every stop string.
struct Expected {
    std::string text;
    bool stopped = false;
};

Expected by_search(const std::string& text, const std::vector<std::string>& stops, bool include) {
    for (size_t end = 1; end <= text.size(); ++end) {
        size_t longest = 0;
        for (const std::string& stop : stops) {
            if (!stop.empty() && text.substr(0, end).ends_with(stop)) {
                longest = std::max(longest, stop.size());
            }
        }
        if (longest > 0) {
            return {text.substr(0, include ? end : end - longest), true};
        }
    }
    return {text, false};
}

Expected by_matcher(const std::vector<std::string>& chunks, const std::vector<std::string>& stops,
                    bool include) {
    StopMatcher matcher(stops, include);
    Expected out;
    for (const std::string& chunk : chunks) {
        const StopMatcher::Output shown = matcher.push(chunk);
        out.text += shown.text;
        out.stopped = shown.stopped;
    }
    out.text += matcher.flush();
    return out;
}

TEST(StopMatcher, HoldsBackBeginnings) {
    StopMatcher matcher({"STOP", "OPEN"});
    EXPECT_EQ(matcher.push("a ST").text, "a ");
    EXPECT_EQ(matcher.push("O").text, "");
    EXPECT_EQ(matcher.push("x").text, "STOx");
    EXPECT_EQ(matcher.push("STOPE").text, "");  // the first to end is STOP
    EXPECT_TRUE(matcher.push("N").stopped);
    EXPECT_EQ(matcher.flush(), "");
}

TEST(StopMatcher, FlushGivesWhatWasHeld) {
    StopMatcher matcher({"\n\n"});
    EXPECT_EQ(matcher.push("a\n").text, "a");
    EXPECT_EQ(matcher.flush(), "\n");
    EXPECT_EQ(StopMatcher({}).push("any").text, "any");
    EXPECT_EQ(StopMatcher({""}).push("any").text, "any");
}

TEST(StopMatcher, PrefixesAndOverlaps) {
    const std::vector<std::string> stops = {"ab", "abc", "bb"};
    EXPECT_EQ(by_matcher({"xa", "bc"}, stops, false).text, "x");
    EXPECT_EQ(by_matcher({"xa", "bc"}, stops, true).text, "xab");
    EXPECT_EQ(by_matcher({"a", "a", "b"}, {"aab", "b"}, false).text, "");
    EXPECT_EQ(by_matcher({"aaab"}, {"aab", "b"}, false).text, "a");
}

RC_GTEST_PROP(StopMatcherProperty, AnyChunksAsBySearch, (uint32_t seed, bool include)) {
    std::mt19937 random(seed);
    const auto word = [&](uint32_t longest) {
        std::string out(random() % (longest + 1), ' ');
        for (char& c : out) {
            c = static_cast<char>('a' + random() % 2);
        }
        return out;
    };
    std::vector<std::string> stops(random() % 4);
    for (std::string& stop : stops) {
        stop = word(5);
    }
    std::vector<std::string> chunks(random() % 12);
    std::string text;
    for (std::string& chunk : chunks) {
        chunk = word(4);
        text += chunk;
    }
    const Expected expected = by_search(text, stops, include);
    const Expected got = by_matcher(chunks, stops, include);
    RC_ASSERT(got.text == expected.text);
    RC_ASSERT(got.stopped == expected.stopped);
}

}  // namespace
}  // namespace tessera

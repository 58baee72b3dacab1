#include "server/token_stream.h"

#include <algorithm>
#include <random>

#include "server/openai/openai_test_support.h"

namespace tessera {
namespace {

TokenEvent event_of(const std::vector<TokenId>& ids) {
    TokenEvent event;
    for (const TokenId id : ids) {
        event.tokens.push_back({.token = id});
    }
    event.prompt_tokens = 5;
    event.cached_tokens = 3;
    return event;
}

TokenEvent end_event(FinishReason finish, TokenId stop_token = -1) {
    TokenEvent event = event_of(stop_token >= 0 ? std::vector<TokenId>{stop_token} : std::vector<TokenId>{});
    event.finish = finish;
    event.stop_token = stop_token;
    return event;
}

struct Outcome {
    std::string content;
    std::string reasoning;
    size_t tokens = 0;
    FinishReason finish = FinishReason::kNone;
    std::string stop_text;
    TokenId stop_token = -1;
    std::vector<int32_t> completed;  // calls of answer_complete
    int32_t completion_tokens = 0, reasoning_tokens = 0;
};

// Pushes ids in events of `step` tokens each, then the end.
Outcome play(TokenStreamConfig config, const std::vector<TokenId>& ids, size_t step, TokenEvent end) {
    Outcome out;
    TokenStream stream(demo_tokenizer(), std::move(config), [&](int32_t n) { out.completed.push_back(n); });
    const auto add = [&](StreamDelta&& delta) {
        out.content += delta.output.content;
        out.reasoning += delta.output.reasoning;
        out.tokens += delta.tokens.size();
        out.finish = delta.finish;
        out.stop_text = delta.stop_text;
        out.stop_token = delta.stop_token;
    };
    for (size_t i = 0; i < ids.size(); i += step) {
        const auto last = ids.begin() + static_cast<std::ptrdiff_t>(std::min(ids.size(), i + step));
        add(stream.push(event_of({ids.begin() + static_cast<std::ptrdiff_t>(i), last})));
        EXPECT_EQ(out.finish, FinishReason::kNone);
    }
    add(stream.push(std::move(end)));
    out.completion_tokens = stream.completion_tokens();
    out.reasoning_tokens = stream.reasoning_tokens();
    EXPECT_EQ(out.tokens, static_cast<size_t>(out.completion_tokens));
    return out;
}

TEST(TokenStream, ShowsTextAndHidesTheStopToken) {
    const std::string text = "Grüße, 世界! \xF0\x9F\xA6\xA6 done";
    for (size_t step = 1; step <= 4; ++step) {
        const Outcome out = play({}, demo_ids(text), step, end_event(FinishReason::kStop, kDemoEos));
        EXPECT_EQ(out.content, text);
        EXPECT_EQ(out.finish, FinishReason::kStop);
        EXPECT_EQ(static_cast<size_t>(out.completion_tokens), demo_ids(text).size() + 1) << "EOS counts";
        EXPECT_TRUE(out.completed.empty());
    }
}

TEST(TokenStream, EndsAtAStopString) {
    const std::vector<TokenId> ids = demo_ids("one two three four five");
    for (size_t step = 1; step <= 4; ++step) {
        const Outcome out =
            play({.stop = {"nothing", "ree fo"}}, ids, step, end_event(FinishReason::kLength));
        EXPECT_EQ(out.content, "one two th");
        EXPECT_EQ(out.finish, FinishReason::kStop) << "the stop string came first";
        ASSERT_EQ(out.completed.size(), 1u);
        EXPECT_EQ(out.completed[0], out.completion_tokens);
        // Exactly the tokens up to the one that completed the stop string.
        const std::vector<TokenId> kept(ids.begin(), ids.begin() + out.completion_tokens);
        EXPECT_NE(demo_tokenizer().decode(kept, true).find("ree fo"), std::string::npos);
        EXPECT_EQ(demo_tokenizer().decode(std::span(kept).first(kept.size() - 1), true).find("ree fo"),
                  std::string::npos);
    }
    const Outcome shown =
        play({.stop = {"ree fo"}, .include_stop = true}, ids, 1, end_event(FinishReason::kStop));
    EXPECT_EQ(shown.content, "one two three fo");
}

TEST(TokenStream, ReleasesWhatWasNoStopString) {
    const Outcome out = play({.stop = {"five!"}}, demo_ids("one five"), 1, end_event(FinishReason::kLength));
    EXPECT_EQ(out.content, "one five");
    EXPECT_EQ(out.finish, FinishReason::kLength);
}

TEST(TokenStream, StopStringsCountAfterMinTokens) {
    const std::vector<TokenId> ids = demo_ids("stop stop stop");
    TokenStreamConfig config{.stop = {"stop"}};
    config.min_tokens = static_cast<int32_t>(demo_ids("stop").size());
    const Outcome out = play(std::move(config), ids, 1, end_event(FinishReason::kLength));
    EXPECT_EQ(out.content, "stop ");
    EXPECT_EQ(out.finish, FinishReason::kStop);
    EXPECT_EQ(out.stop_text, "stop");
}

TEST(TokenStream, ShowsAStopTokenOnlyWhenAsked) {
    const TokenId last = demo_ids(" end").back();
    EXPECT_EQ(play({}, demo_ids("the"), 1, end_event(FinishReason::kStop, last)).content, "the");
    const Outcome shown =
        play({.include_stop = true}, demo_ids("the"), 1, end_event(FinishReason::kStop, last));
    EXPECT_EQ(shown.content, "the" + demo_tokenizer().decode(std::vector<TokenId>{last}, true));
    EXPECT_EQ(
        play({.include_stop = true}, demo_ids("the"), 1, end_event(FinishReason::kStop, kDemoEos)).content,
        "the")
        << "special tokens are skipped";
    EXPECT_NE(play({.skip_special = false, .include_stop = true}, demo_ids("the"), 1,
                   end_event(FinishReason::kStop, kDemoEos))
                  .content,
              "the");
}

TEST(TokenStream, NamesTheRequestsOwnStopIdAsTheReason) {
    const TokenId own = demo_ids(" end").back();
    const TokenEvent by_own = end_event(FinishReason::kStop, own);
    EXPECT_EQ(play({.stop_ids = {own}}, demo_ids("the"), 1, by_own).stop_token, own);
    const TokenEvent by_eos = end_event(FinishReason::kStop, kDemoEos);
    EXPECT_EQ(play({.stop_ids = {own}}, demo_ids("the"), 1, by_eos).stop_token, -1);
    EXPECT_EQ(play({.stop_ids = {own}}, demo_ids("the"), 1, end_event(FinishReason::kLength)).stop_token, -1);
    // A stop string that came first is the reason, whatever the engine ended with.
    const Outcome both = play({.stop = {"the"}, .stop_ids = {own}}, demo_ids("the"), 1, by_own);
    EXPECT_EQ(both.stop_token, -1);
    EXPECT_EQ(both.stop_text, "the");
}

TEST(TokenStream, AnUnfinishedCodePointEndsAsReplacement) {
    std::vector<TokenId> ids = demo_ids("\xF0\x9F\xA6\xA6");
    ASSERT_GT(ids.size(), 1u) << "the test needs a code point of several tokens";
    ids.pop_back();
    const Outcome out = play({}, ids, 1, end_event(FinishReason::kLength));
    EXPECT_EQ(out.content, "\xEF\xBF\xBD");
}

TEST(TokenStream, CountsReasoningTokens) {
    const Hy3Tokens tokens(demo_tokenizer().token_suffix());
    TokenStreamConfig config;
    config.parser =
        OutputParserConfig{.suffix = demo_tokenizer().token_suffix(), .start = OutputStart::kReasoning};
    config.think_end = demo_tokenizer().added_token(tokens.think_end).value();
    const Outcome out = play(std::move(config), demo_ids("let me think" + tokens.think_end + "answer"), 1,
                             end_event(FinishReason::kStop, kDemoEos));
    EXPECT_EQ(out.reasoning, "let me think");
    EXPECT_EQ(out.content, "answer");
    EXPECT_EQ(static_cast<size_t>(out.reasoning_tokens), demo_ids("let me think").size());
}

TEST(TokenStream, TextOffsetsCountCharacters) {
    const std::vector<TokenId> ids = demo_ids("é世 x");
    TokenStream stream(demo_tokenizer(), {}, [](int32_t) {});
    std::string shown;
    for (const TokenId id : ids) {
        const StreamDelta delta = stream.push(event_of({id}));
        ASSERT_EQ(delta.tokens.size(), 1u);
        const auto characters =
            std::count_if(shown.begin(), shown.end(), [](char c) { return (c & 0xC0) != 0x80; });
        EXPECT_EQ(delta.tokens[0].text_offset, characters);
        shown += delta.output.content;
    }
}

TEST(TokenStream, SaysWhatTheEngineSaid) {
    TokenEvent failed = end_event(FinishReason::kError);
    failed.error = "row is NaN";
    TokenStream stream(demo_tokenizer(), {}, [](int32_t) {});
    const StreamDelta delta = stream.push(std::move(failed));
    EXPECT_EQ(delta.finish, FinishReason::kError);
    EXPECT_EQ(delta.error, "row is NaN");
    EXPECT_EQ(stream.prompt_tokens(), 5);
    EXPECT_EQ(stream.cached_tokens(), 3);
}

}  // namespace
}  // namespace tessera

#include "load_stream.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace tessera {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

constexpr std::string_view kChat =
    "data: {\"choices\":[{\"delta\":{\"role\":\"assistant\",\"content\":\"\"},\"finish_reason\":null}]}\n\n"
    ": ping\n\n"
    "data: {\"choices\":[{\"delta\":{\"reasoning\":\"a\"},\"finish_reason\":null}],\"usage\":null}\n\n"
    "data: {\"choices\":[{\"delta\":{\"content\":\"b\"},\"finish_reason\":null}]}\r\n\r\n"
    "data: {\"choices\":[{\"delta\":{\"tool_calls\":[{\"index\":0}]},\"finish_reason\":null}]}\n\n"
    "data: {\"choices\":[{\"delta\":{},\"finish_reason\":\"stop\"}]}\n\n"
    "data: {\"choices\":[],\"usage\":{\"prompt_tokens\":7,\"completion_tokens\":9,"
    "\"prompt_tokens_details\":{\"cached_tokens\":5}}}\n\n"
    "data: [DONE]\n\n";

// Feeds one event after the other, event i at time 10 * i.
LoadResult fed(std::string_view text) {
    LoadResult result;
    LoadStream stream(result);
    TimeNs now = 0;
    while (!text.empty()) {
        const size_t end = std::min(text.find("\n\n"), text.size() - 2) + 2;
        stream.feed(text.substr(0, end), now);
        text.remove_prefix(end);
        now += 10;
    }
    stream.end(now);
    return result;
}

TEST(LoadStream, CountsOutputsAndUsage) {
    const LoadResult result = fed(kChat);
    EXPECT_EQ(result.error, "");
    EXPECT_EQ(result.first, 20);
    EXPECT_EQ(result.finished, 30);
    EXPECT_THAT(result.gaps, ElementsAre(10, 0));  // the two events that end in \r\n come as one piece
    EXPECT_EQ(result.prompt_tokens, 7);
    EXPECT_EQ(result.cached_tokens, 5);
    EXPECT_EQ(result.output_tokens, 9);
}

TEST(LoadStream, AnyCutGivesTheSame) {
    for (size_t piece = 1; piece < 40; ++piece) {
        LoadResult result;
        LoadStream stream(result);
        for (size_t at = 0; at < kChat.size(); at += piece) {
            stream.feed(kChat.substr(at, piece), 0);
        }
        stream.end(0);
        EXPECT_EQ(result.error, "");
        EXPECT_EQ(result.gaps.size(), 2U);
        EXPECT_EQ(result.output_tokens, 9);
    }
}

TEST(LoadStream, StreamsThatBreakTheContract) {
    EXPECT_THAT(fed("data: {\"choices\":[{\"text\":\"x\",\"finish_reason\":\"stop\"}]}\n\n").error,
                HasSubstr("[DONE]"));
    EXPECT_THAT(fed("data: {\"choices\":[{\"text\":\"x\"}]}\n\ndata: [DONE]\n\n").error,
                HasSubstr("finish_reason"));
    EXPECT_THAT(fed("data: {\"choices\":\n\n").error, HasSubstr("no JSON"));
    EXPECT_THAT(fed("data: {\"error\":{\"message\":\"lost\"}}\n\ndata: [DONE]\n\n").error, HasSubstr("lost"));
    EXPECT_THAT(fed("").error, HasSubstr("[DONE]"));
}

TEST(LoadStream, WithoutUsageOutputsAreCounted) {
    const LoadResult result =
        fed("data: {\"choices\":[{\"text\":\"x\"}]}\n\ndata: "
            "{\"choices\":[{\"text\":\"y\",\"finish_reason\":\"length\"}]}\n\n"
            "data: [DONE]\n\n");
    EXPECT_EQ(result.error, "");
    EXPECT_EQ(result.output_tokens, 2);
}

}  // namespace
}  // namespace tessera

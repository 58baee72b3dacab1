#include "server/http/http_server_parser.h"

#include <algorithm>
#include <functional>
#include <gtest/gtest.h>
#include <random>
#include <string>

namespace tessera {
namespace {

using State = HttpRequestParser::State;

// Feeds `bytes` in pieces of the given sizes (the last repeats), as a connection would; returns what was left
// over.
std::string feed(HttpRequestParser& parser, std::string_view bytes, const std::function<size_t()>& piece) {
    std::string input;
    while (true) {
        while (!input.empty() && (parser.state() == State::kHeader || parser.state() == State::kBody)) {
            const State before = parser.state();
            const size_t used = parser.feed(input);
            input.erase(0, used);
            if (used == 0 && parser.state() == before) {
                break;
            }
        }
        if (bytes.empty() || parser.state() == State::kComplete || parser.state() == State::kFailed) {
            return input + std::string(bytes);
        }
        const size_t n = std::min(std::max<size_t>(piece(), 1), bytes.size());
        input += bytes.substr(0, n);
        bytes.remove_prefix(n);
    }
}

std::string feed_whole(HttpRequestParser& parser, std::string_view bytes) {
    return feed(parser, bytes, [&] { return bytes.size(); });
}

int failure(std::string_view bytes, HttpParserLimits limits = {}) {
    HttpRequestParser parser(limits);
    feed_whole(parser, bytes);
    return parser.state() == State::kFailed ? parser.error().status : 0;
}

TEST(HttpRequestParser, ReadsARequest) {
    HttpRequestParser parser({});
    const std::string rest =
        feed_whole(parser,
                   "POST /v1/completions?a=b HTTP/1.1\r\nHost: x\r\nX-Thing:  two words \r\n"
                   "Content-Length: 5\r\n\r\nhelloGET");
    ASSERT_EQ(parser.state(), State::kComplete);
    EXPECT_EQ(rest, "GET");
    EXPECT_EQ(parser.request().method, "POST");
    EXPECT_EQ(parser.request().path, "/v1/completions");
    EXPECT_EQ(parser.request().query, "a=b");
    EXPECT_EQ(parser.request().header("x-thing"), "two words");
    EXPECT_EQ(parser.request().body, "hello");
    EXPECT_TRUE(parser.keep_alive());
    EXPECT_FALSE(parser.http_1_0());
}

TEST(HttpRequestParser, AbsoluteTarget) {
    HttpRequestParser parser({});
    feed_whole(parser, "GET http://host:80?q HTTP/1.1\r\nHost: host\r\n\r\n");
    ASSERT_EQ(parser.state(), State::kComplete);
    EXPECT_EQ(parser.request().path, "/");
    EXPECT_EQ(parser.request().query, "q");
}

TEST(HttpRequestParser, EverySplitGivesTheSame) {
    const std::string requests[] = {
        "POST /a HTTP/1.1\r\nHost: x\r\nContent-Length: 11\r\n\r\nhello world",
        "POST /a HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n5;ext=1\r\nhello\r\n6\r\n "
        "world\r\n0\r\n"
        "Trailer: t\r\n\r\n",
        "POST /a HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    };
    std::mt19937 random(1);
    for (const std::string& request : requests) {
        HttpRequestParser whole({});
        feed_whole(whole, request);
        ASSERT_EQ(whole.state(), State::kComplete) << whole.error().message;
        for (int round = 0; round < 200; ++round) {
            const size_t piece_max = 1 + static_cast<size_t>(round) / 8;
            HttpRequestParser parser({});
            const std::string rest = feed(parser, request + "NEXT", [&] { return 1 + random() % piece_max; });
            ASSERT_EQ(parser.state(), State::kComplete) << parser.error().message;
            EXPECT_EQ(rest, "NEXT");
            EXPECT_EQ(parser.request().body, whole.request().body);
            EXPECT_EQ(parser.request().headers, whole.request().headers);
        }
    }
}

TEST(HttpRequestParser, RefusesWhatCouldHideARequest) {
    EXPECT_EQ(
        failure("POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\nTransfer-Encoding: chunked\r\n\r\n"),
        400);
    EXPECT_EQ(
        failure("POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\nContent-Length: 3\r\n\r\n"),
        400);
    EXPECT_EQ(failure("POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\nContent-Length: 4\r\n\r\n"), 400);
    EXPECT_EQ(failure("POST / HTTP/1.1\r\nHost: x\r\nContent-Length: -3\r\n\r\n"), 400);
    EXPECT_EQ(failure("POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 99999999999999999999999\r\n\r\n"), 400);
    EXPECT_EQ(failure("POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: gzip\r\nContent-Length: 3\r\n\r\n"),
              501);
    EXPECT_EQ(failure("POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: gzip, chunked\r\n\r\n"), 501);
    EXPECT_EQ(failure("POST / HTTP/1.0\r\nTransfer-Encoding: chunked\r\n\r\n"), 501);
    EXPECT_EQ(failure("GET / HTTP/1.1\r\n\r\n"), 400);
    EXPECT_EQ(failure("GET / HTTP/1.1\r\nHost: a\r\nHost: b\r\n\r\n"), 400);
    EXPECT_EQ(failure("GET / HTTP/1.1\r\nHost : a\r\n\r\n"), 400);
    EXPECT_EQ(failure("GET / HTTP/1.1\r\nHost: a\n\n"), 400);
    EXPECT_EQ(failure("GET / HTTP/2.0\r\nHost: a\r\n\r\n"), 505);
    EXPECT_EQ(failure("\x16\x03\x01\x02\x00\x01"), 400);  // a TLS client hello
}

TEST(HttpRequestParser, Limits) {
    const HttpParserLimits limits{.header_bytes_max = 256, .body_bytes_max = 10};
    const std::string long_text(300, 'a');
    EXPECT_EQ(failure("GET /" + long_text, limits), 431);
    EXPECT_EQ(failure("GET / HTTP/1.1\r\nHost: x\r\nA: " + long_text, limits), 431);
    EXPECT_EQ(failure("GET / HTTP/1.1\r\nHost: x\r\nA: " + long_text + "\r\n\r\n", limits), 431);
    // The request line and the fields count together.
    const std::string half(150, 'a');
    EXPECT_EQ(failure("GET /" + half + " HTTP/1.1\r\nHost: x\r\nA: " + half + "\r\n\r\n", limits), 431);
    EXPECT_EQ(failure("POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 10\r\n\r\n0123456789", limits), 0);
    EXPECT_EQ(failure("POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 11\r\n\r\n", limits), 413);
    const std::string chunked = "POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n";
    EXPECT_EQ(failure(chunked + "8\r\n01234567\r\n3\r\n", limits), 413);
    EXPECT_EQ(failure(chunked + "ffffffffffffffff\r\n", limits), 413);
    EXPECT_EQ(failure(chunked + "fffffffffffffffff\r\n", limits), 400);
    EXPECT_EQ(failure(chunked + "3;" + long_text, limits), 431);              // an endless chunk extension
    EXPECT_EQ(failure(chunked + "0\r\nTrailer: " + long_text, limits), 431);  // an endless trailer
    EXPECT_EQ(failure(chunked + "zz\r\n", limits), 400);
}

TEST(HttpRequestParser, Expect) {
    const std::string head = "POST / HTTP/1.1\r\nHost: x\r\nExpect: 100-Continue\r\n";
    HttpRequestParser waits({});
    feed_whole(waits, head + "Content-Length: 3\r\n\r\n");
    EXPECT_EQ(waits.state(), State::kBody);
    EXPECT_TRUE(waits.expects_continue());
    EXPECT_EQ(waits.content_length(), 3u);
    HttpRequestParser empty({});
    feed_whole(empty, head + "\r\n");
    EXPECT_EQ(empty.state(), State::kComplete);
    EXPECT_FALSE(empty.expects_continue());
}

}  // namespace
}  // namespace tessera

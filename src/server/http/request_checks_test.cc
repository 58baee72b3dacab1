#include "server/http/request_checks.h"

#include <algorithm>
#include <gtest/gtest.h>
#include <memory>
#include <string>
#include <utility>

namespace tessera {
namespace {

class Checks : public testing::Test {
  protected:
    Checks() {
        const auto handler = [](const std::shared_ptr<HttpExchange>&) {};
        routes_.add({.method = "GET", .path = "/health", .handler = handler, .open = true});
        routes_.add({.method = "GET", .path = "/v1/models", .handler = handler});
        routes_.add({.method = "GET", .path = "/v1/models/*", .handler = handler});
        routes_.add(
            {.method = "POST", .path = "/v1/chat/completions", .handler = handler, .json_body = true});
    }

    HeaderVerdict check(std::string method, std::string path, HttpHeaders headers) {
        const AccessRules access(config_, bound_);
        if (std::ranges::none_of(headers, [](const auto& field) { return field.first == "host"; })) {
            headers.emplace_back("host", "127.0.0.1:8000");
        }
        request_ = {.method = std::move(method), .path = std::move(path), .headers = std::move(headers)};
        return check_header(routes_, access, request_);
    }
    int status(std::string method, std::string path, HttpHeaders headers) {
        const HeaderVerdict verdict = check(std::move(method), std::move(path), std::move(headers));
        return verdict.route != nullptr ? 200 : verdict.preflight ? 204 : verdict.error.status;
    }

    HttpServerConfig config_;
    BoundAddress bound_{.address = "127.0.0.1", .port = 8000, .loopback = true};
    RouteTable routes_;
    HttpRequest request_;
};

const HttpHeaders kJson = {{"content-type", "application/json"}};

HttpHeaders with(HttpHeaders headers, std::string name, std::string value) {
    headers.emplace_back(std::move(name), std::move(value));
    return headers;
}

TEST_F(Checks, Routes) {
    EXPECT_EQ(status("GET", "/health", {}), 200);
    EXPECT_EQ(status("HEAD", "/health", {}), 200);
    EXPECT_EQ(status("GET", "/v1/models/some/name", {}), 200);
    EXPECT_EQ(status("GET", "/nothing", {}), 404);
    const HeaderVerdict wrong = check("DELETE", "/health", {});
    EXPECT_EQ(wrong.error.status, 405);
    ASSERT_EQ(wrong.headers.size(), 1u);
    EXPECT_EQ(wrong.headers[0], (std::pair<std::string, std::string>("Allow", "GET, HEAD")));
}

TEST_F(Checks, Keys) {
    config_.api_keys = {"one", "two"};
    EXPECT_EQ(status("GET", "/health", {}), 200);
    EXPECT_EQ(status("GET", "/v1/models", {}), 401);
    EXPECT_EQ(status("GET", "/v1/models", {{"authorization", "Bearer three"}}), 401);
    EXPECT_EQ(status("GET", "/v1/models", {{"authorization", "Bearer "}}), 401);
    EXPECT_EQ(status("GET", "/v1/models", {{"authorization", "Basic one"}}), 401);
    EXPECT_EQ(status("GET", "/v1/models", {{"authorization", "Bearer onex"}}), 401);
    EXPECT_EQ(status("GET", "/v1/models", {{"authorization", "Bearer one"}}), 200);
    const std::string first = request_.tenant;
    EXPECT_EQ(status("GET", "/v1/models", {{"authorization", "bearer  two"}}), 200);
    EXPECT_EQ(first.size(), 64u);
    EXPECT_EQ(request_.tenant.size(), 64u);
    EXPECT_NE(request_.tenant, first);
    // The tenant's name tells nothing about the digest that keys are compared by.
    EXPECT_NE(first, hex(sha256("one")));
}

TEST_F(Checks, HeadersThatDecideComeOnce) {
    config_.api_keys = {"one"};
    const HttpHeaders good = {{"authorization", "Bearer one"},
                              {"content-type", "application/json"},
                              {"content-encoding", "identity"},
                              {"origin", "http://127.0.0.1:8000"}};
    EXPECT_EQ(status("POST", "/v1/chat/completions", good), 200);
    for (const auto& [name, value] : good) {
        EXPECT_EQ(status("POST", "/v1/chat/completions", with(good, name, value)), 400) << name;
        EXPECT_EQ(status("POST", "/v1/chat/completions", with(good, name, "text/plain")), 400) << name;
    }
    EXPECT_EQ(status("POST", "/v1/chat/completions", with(with(good, "x-other", "a"), "x-other", "b")), 200);
}

TEST_F(Checks, ACompressedBodyIsRefused) {
    EXPECT_EQ(status("POST", "/v1/chat/completions", with(kJson, "content-encoding", "gzip")), 415);
    EXPECT_EQ(status("POST", "/v1/chat/completions", with(kJson, "content-encoding", "identity")), 200);
}

TEST_F(Checks, WithoutKeysThereIsNoTenant) {
    EXPECT_EQ(status("GET", "/v1/models", {{"authorization", "Bearer anything"}}), 200);
    EXPECT_EQ(request_.tenant, "");
}

TEST_F(Checks, ContentType) {
    EXPECT_EQ(status("POST", "/v1/chat/completions", kJson), 200);
    EXPECT_EQ(status("POST", "/v1/chat/completions", {{"content-type", "Application/JSON ; charset=utf-8"}}),
              200);
    EXPECT_EQ(status("POST", "/v1/chat/completions", {}), 415);
    EXPECT_EQ(status("POST", "/v1/chat/completions", {{"content-type", "text/plain"}}), 415);
    EXPECT_EQ(status("POST", "/v1/chat/completions", {{"content-type", "application/jsonx"}}), 415);
}

TEST_F(Checks, HostOnLoopback) {
    for (const char* host : {"127.0.0.1:8000", "localhost:8000", "LOCALHOST:8000", "[::1]:8000", "localhost",
                             "localhost:9000", "127.0.0.1:1"}) {
        EXPECT_EQ(status("POST", "/v1/chat/completions", with(kJson, "host", host)), 200) << host;
    }
    for (const char* host :
         {"evil.example:8000", "localhost.evil.example:8000", "127.0.0.1.evil.example:8000", ""}) {
        EXPECT_EQ(status("POST", "/v1/chat/completions", with(kJson, "host", host)), 403) << host;
        EXPECT_EQ(status("GET", "/v1/models", {{"host", host}}), 403) << host;
        EXPECT_EQ(status("GET", "/health", {{"host", host}}), 200) << host;
    }
    config_.allowed_hosts = {"Gateway.example", "other.example:9000"};
    EXPECT_EQ(status("GET", "/v1/models", {{"host", "gateway.example:1234"}}), 200);
    EXPECT_EQ(status("GET", "/v1/models", {{"host", "gateway.example"}}), 200);
    EXPECT_EQ(status("GET", "/v1/models", {{"host", "other.example:9000"}}), 200);
    EXPECT_EQ(status("GET", "/v1/models", {{"host", "other.example:9001"}}), 403);
    EXPECT_EQ(status("GET", "/v1/models", {{"host", "localhost:8000:9001"}}), 403);
}

TEST_F(Checks, HostElsewhere) {
    bound_ = {.address = "0.0.0.0", .port = 8000, .loopback = false};
    EXPECT_EQ(status("GET", "/v1/models", {{"host", "any.example:8000"}}), 200);
    EXPECT_EQ(status("GET", "/v1/models", {{"host", "a:8000"}, {"origin", "http://a:8000"}}), 200);
    EXPECT_EQ(status("GET", "/v1/models", {{"host", "a:8000"}, {"origin", "http://b:8000"}}), 403);
}

TEST_F(Checks, DefaultPortIsLeftOut) {
    config_.host = "box.example";
    bound_.port = 80;
    EXPECT_EQ(status("GET", "/v1/models", {{"host", "box.example"}}), 200);
    bound_.tls = true;
    EXPECT_EQ(status("GET", "/v1/models", {{"host", "box.example"}}), 403);
    bound_.port = 443;
    EXPECT_EQ(status("GET", "/v1/models", {{"host", "box.example"}}), 200);
}

TEST_F(Checks, Origin) {
    const auto post = [&](const char* origin) {
        return status("POST", "/v1/chat/completions", with(kJson, "origin", origin));
    };
    EXPECT_EQ(post("http://127.0.0.1:8000"), 200);
    for (const char* origin :
         {"http://evil.example", "https://127.0.0.1:8000", "http://127.0.0.1:3000", "null"}) {
        EXPECT_EQ(post(origin), 403) << origin;
    }
    EXPECT_TRUE(check("POST", "/v1/chat/completions", with(kJson, "origin", "http://127.0.0.1:8000"))
                    .headers.empty());
    config_.allowed_origins = {"https://app.example"};
    EXPECT_EQ(post("https://app.example"), 200);
    EXPECT_EQ(post("https://app.example.evil.example"), 403);
}

TEST_F(Checks, Preflight) {
    const HttpHeaders ask = {{"origin", "https://app.example"}, {"access-control-request-method", "POST"}};
    EXPECT_EQ(status("OPTIONS", "/v1/chat/completions", ask), 405);
    config_.api_keys = {"one"};  // a preflight carries no key
    config_.allowed_origins = {"https://app.example"};
    const HeaderVerdict verdict = check("OPTIONS", "/v1/chat/completions", ask);
    EXPECT_TRUE(verdict.preflight);
    ASSERT_FALSE(verdict.headers.empty());
    EXPECT_EQ(verdict.headers[0].second, "https://app.example");
    EXPECT_EQ(status("OPTIONS", "/v1/chat/completions", {{"origin", "https://evil.example"}}), 405);
    config_.allowed_origins = {"*"};
    EXPECT_EQ(status("OPTIONS", "/v1/chat/completions", ask), 204);
}

TEST(RequestId, IsCheckedOrMade) {
    EXPECT_EQ(request_id("abc-123"), "abc-123");
    EXPECT_EQ(request_id(std::string(128, 'a')), std::string(128, 'a'));
    EXPECT_TRUE(request_id("").starts_with("req-"));
    EXPECT_TRUE(request_id(std::string(129, 'a')).starts_with("req-"));
    EXPECT_TRUE(request_id("two words").starts_with("req-"));
    EXPECT_TRUE(request_id("caf\xc3\xa9").starts_with("req-"));
    EXPECT_NE(request_id(""), request_id(""));
}

}  // namespace
}  // namespace tessera

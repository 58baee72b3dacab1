// The whole server over real sockets, with a scripted model under the engine.
#include "server/server.h"

#include <algorithm>
#include <chrono>
#include <gtest/gtest.h>
#include <memory>
#include <string>
#include <thread>

#include "base/json.h"
#include "server/http/test_client.h"
#include "server/openai/openai_test_support.h"
#include "server/page_files.h"
#include "server/system_routes.h"

namespace tessera {
namespace {

using std::chrono::milliseconds;

class ServerTest : public testing::Test {
  protected:
    void serve(Script script, HttpServerConfig http = {}, std::chrono::microseconds step_time = {}) {
        http.port = 0;
        Result<std::unique_ptr<Server>> bound = Server::bind(http);
        ASSERT_TRUE(bound.ok()) << bound.status().message();
        server_ = bound.take();
        engine_ = std::make_unique<Engine>(
            OpenAiFixture::engine_config(),
            std::make_unique<ScriptedModel>([script](const SlotInit&) { return script; }, step_time));
        server_->start({.openai = OpenAiFixture::service_config({}),
                        .metrics = {.model_name = "demo", .max_model_len = 2048, .num_pages = 256},
                        .engine = *engine_,
                        .tokenizer = demo_tokenizer()});
    }
    ~ServerTest() override {
        if (engine_) {
            server_->shutdown(milliseconds(0));
            engine_.reset();
        }
    }

    std::string get(const std::string& path, const std::string& fields = "") const {
        return "GET " + path + " HTTP/1.1\r\nHost: localhost:" + std::to_string(server_->port()) + "\r\n" +
               fields + "\r\n";
    }
    std::string completion(const std::string& more) const {
        const std::string body = R"({"model":"demo","prompt":[1,2,3])" + more + "}";
        return "POST /v1/completions HTTP/1.1\r\nHost: localhost:" + std::to_string(server_->port()) +
               "\r\nContent-Type: application/json\r\nContent-Length: " + std::to_string(body.size()) +
               "\r\n\r\n" + body;
    }
    double metric(const std::string& name) {
        const std::string text = "\n" + TestClient(server_->port()).ask(get("/metrics")).body;
        const size_t at = text.find("\n" + name + "{");
        EXPECT_NE(at, std::string::npos) << name;
        return at == std::string::npos ? -1 : std::stod(text.substr(text.find("} ", at) + 2));
    }

    std::unique_ptr<Server> server_;  // destroyed after the engine
    std::unique_ptr<Engine> engine_;
};

TEST_F(ServerTest, OperatorRoutes) {
    serve({.tokens = {5, 6, 7}});
    TestClient client(server_->port());
    for (const char* path : {"/health", "/ready"}) {
        const TestAnswer answer = client.ask(get(path));
        EXPECT_EQ(answer.status, 200) << path;
        EXPECT_EQ(answer.body, "{}");
    }
    EXPECT_EQ(client.ask(get("/version")).body, std::string("{\"version\":\"") + TESSERA_VERSION + "\"}");
    EXPECT_TRUE(client.ask(get("/metrics")).field("Content-Type").starts_with("text/plain; version=0.0.4"));
    EXPECT_TRUE(json::parse(client.ask(get("/stats")).body).ok());
}

TEST_F(ServerTest, AKeyGuardsAllButProbesAndThePage) {
    serve({.tokens = {5}}, {.api_keys = {"secret"}});
    TestClient client(server_->port());
    for (const char* path : {"/health", "/ready", "/version", "/", "/app.js"}) {
        EXPECT_EQ(client.ask(get(path)).status, 200) << path;
    }
    for (const char* path : {"/metrics", "/stats", "/v1/models"}) {
        EXPECT_EQ(client.ask(get(path)).status, 401) << path;
        EXPECT_EQ(client.ask(get(path, "Authorization: Bearer secret\r\n")).status, 200) << path;
    }
    EXPECT_EQ(client.ask(completion("")).status, 401);
}

TEST_F(ServerTest, AnswersCountExactly) {
    serve({.tokens = {5, 6, 7}});
    TestClient client(server_->port());
    for (int i = 0; i < 4; ++i) {
        EXPECT_EQ(client.ask(completion(R"(,"max_tokens":2)")).status, 200);
    }
    EXPECT_EQ(client.ask(completion(R"(,"max_tokens":-1)")).status, 400);
    EXPECT_EQ(metric("vllm:generation_tokens_total"), 8);
    EXPECT_EQ(metric("vllm:prompt_tokens_total"), 12);
    EXPECT_EQ(metric("vllm:time_to_first_token_seconds_count"), 4);
    EXPECT_EQ(metric("vllm:e2e_request_latency_seconds_count"), 4);
    EXPECT_EQ(metric("vllm:request_params_n_count"), 4);
    EXPECT_EQ(metric("vllm:num_requests_running"), 0);
    EXPECT_EQ(metric("tessera:requests_rejected_total"), 1);
}

TEST_F(ServerTest, ADisconnectFreesTheRequest) {
    serve({.tokens = {5, 6}, .endless = true}, {}, std::chrono::microseconds(500));
    {
        TestClient client(server_->port());
        client.send(completion(R"(,"stream":true,"max_tokens":2000)"));
        EXPECT_TRUE(client.receive());
    }
    for (int i = 0; i < 6000 && !engine_->idle(); ++i) {
        std::this_thread::sleep_for(milliseconds(10));
    }
    EXPECT_TRUE(engine_->idle());
}

TEST_F(ServerTest, DrainLetsRunningAnswersEnd) {
    serve({.tokens = {5, 6}, .endless = true}, {}, std::chrono::microseconds(2'000));
    TestClient client(server_->port());
    client.send(completion(R"(,"stream":true,"max_tokens":200)"));
    EXPECT_TRUE(client.receive());
    std::thread stopping([&] { server_->shutdown(milliseconds(120'000)); });
    while (!engine_->draining()) {
        std::this_thread::sleep_for(milliseconds(1));
    }
    TestClient late(server_->port());
    EXPECT_TRUE(!late.connected() || late.ask(get("/ready")).status != 200);
    TestClient refused(server_->port());
    if (refused.connected()) {
        const TestAnswer answer = refused.ask(completion(""));
        EXPECT_TRUE(answer.status == 503 || answer.status == 0) << answer.status;
        EXPECT_EQ(answer.field("Connection"), answer.status == 503 ? "close" : "");
        EXPECT_NE(answer.field("Retry-After").empty(), answer.status == 503);
    }
    const std::string stream = client.read_answer().body;
    stopping.join();
    EXPECT_NE(stream.find("\"finish_reason\":\"length\""), std::string::npos);
    EXPECT_TRUE(stream.ends_with("data: [DONE]\n\n"));
    engine_.reset();
}

TEST_F(ServerTest, ShutdownAbortsWhatIsLeftWithAnError) {
    serve({.tokens = {5, 6}, .endless = true}, {}, std::chrono::microseconds(5'000));
    TestClient client(server_->port());
    client.send(completion(R"(,"stream":true,"max_tokens":2000)"));
    EXPECT_TRUE(client.receive());
    server_->shutdown(milliseconds(1));
    const TestAnswer answer = client.read_answer();
    EXPECT_TRUE(answer.whole);
    EXPECT_NE(answer.body.find("data: {\"error\":"), std::string::npos)
        << answer.body.substr(answer.body.size() - 300);
    EXPECT_TRUE(answer.body.ends_with("data: [DONE]\n\n"));
    engine_.reset();
}

TEST_F(ServerTest, ThePage) {
    serve({.tokens = {5}});
    TestClient client(server_->port());
    const TestAnswer page = client.ask(get("/"));
    EXPECT_EQ(page.status, 200);
    EXPECT_EQ(page.field("Content-Type"), "text/html; charset=utf-8");
    EXPECT_TRUE(page.field("Content-Security-Policy").starts_with("default-src 'none'; script-src 'self';"));
    EXPECT_EQ(page.field("X-Content-Type-Options"), "nosniff");
    EXPECT_EQ(page.field("Referrer-Policy"), "no-referrer");
    const TestAnswer same = client.ask(get("/", "If-None-Match: " + page.field("ETag") + "\r\n"));
    EXPECT_EQ(same.status, 304);
    EXPECT_EQ(same.body, "");
    EXPECT_EQ(client.ask(get("/app.js")).field("Content-Type"), "text/javascript; charset=utf-8");
    ASSERT_FALSE(kEmbeddedFiles.empty());
    for (const EmbeddedFile& file : kEmbeddedFiles) {
        EXPECT_EQ(client.ask(get("/" + std::string(file.name))).body, file.content) << file.name;
    }
    EXPECT_EQ(client.ask(get("/../CMakeLists.txt")).status, 404);
}

TEST(SystemRoutes, AStuckLoopIsUnhealthyAndADrainingServerNotReady) {
    double stalled = 0;
    bool ready = true;
    const ServerMetrics metrics({.model_name = "m"});
    const std::vector<HttpRoute> routes = system_routes({.stalled_s = [&] { return stalled; },
                                                         .ready = [&] { return ready; },
                                                         .engine_stats = [] { return EngineStats(); },
                                                         .metrics = &metrics});
    const auto ask = [&](const std::string& path) {
        const auto route = std::ranges::find(routes, path, &HttpRoute::path);
        auto exchange = std::make_shared<RecordingExchange>(HttpRequest{.method = "GET", .path = path});
        route->handler(exchange);
        return exchange;
    };
    EXPECT_EQ(ask("/health")->status(), 200);
    stalled = 9.9;
    EXPECT_EQ(ask("/health")->status(), 200);
    stalled = 12;
    EXPECT_EQ(ask("/health")->status(), 503);
    EXPECT_NE(ask("/health")->body().find("12 s"), std::string::npos);
    EXPECT_EQ(ask("/ready")->status(), 200);
    ready = false;
    EXPECT_EQ(ask("/ready")->status(), 503);
}

}  // namespace
}  // namespace tessera

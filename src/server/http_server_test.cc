#include "server/http_server.h"

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <future>
#include <gtest/gtest.h>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "server/http/test_client.h"

namespace tessera {
namespace {

using std::chrono::milliseconds;
using Exchange = std::shared_ptr<HttpExchange>;
constexpr milliseconds kPatience{60'000};

// A flag that another thread raises.
class Signal {
  public:
    void raise() {
        std::lock_guard lock(mutex_);
        raised_ = true;
        changed_.notify_all();
    }
    bool wait(milliseconds timeout = kPatience) {
        std::unique_lock lock(mutex_);
        return changed_.wait_for(lock, timeout, [&] { return raised_; });
    }

  private:
    std::mutex mutex_;
    std::condition_variable changed_;
    bool raised_ = false;
};

// Exchanges that a handler parks for the test to answer.
class Parked {
  public:
    void put(Exchange exchange) {
        std::lock_guard lock(mutex_);
        exchanges_.push_back(std::move(exchange));
        changed_.notify_all();
    }
    Exchange take() {
        std::unique_lock lock(mutex_);
        if (!changed_.wait_for(lock, kPatience, [&] { return !exchanges_.empty(); })) {
            return nullptr;
        }
        Exchange exchange = exchanges_.front();
        exchanges_.erase(exchanges_.begin());
        return exchange;
    }

  private:
    std::mutex mutex_;
    std::condition_variable changed_;
    std::vector<Exchange> exchanges_;
};

class HttpServerTest : public testing::Test {
  protected:
    void serve(HttpServerConfig config = {}) {
        config.port = 0;
        Result<std::unique_ptr<HttpServer>> made = HttpServer::create(config);
        ASSERT_TRUE(made.ok()) << made.status().message();
        server_ = made.take();
        server_->add_route({.method = "GET", .path = "/hello", .handler = [](Exchange exchange) {
                                exchange->respond(200, "text/plain", "hello", {{"X-Extra", "1"}});
                            }});
        server_->add_route({.method = "POST", .path = "/echo", .handler = [](Exchange exchange) {
                                exchange->respond(200, "text/plain", exchange->request().body);
                            }});
        server_->add_route({.method = "POST", .path = "/park", .handler = [this](Exchange exchange) {
                                parked_.put(std::move(exchange));
                            }});
        server_->add_route({.method = "GET", .path = "/dropped", .handler = [](Exchange) {}});
        server_->add_route({.method = "GET", .path = "/stream", .handler = [](Exchange exchange) {
                                exchange->start_stream(200, "text/event-stream");
                                exchange->write("one ");
                                exchange->write("");
                                exchange->write("two");
                                exchange->end();
                                EXPECT_FALSE(exchange->write("late"));
                            }});
        server_->start();
    }
    // Waits until every exchange is over and only `connections` connections are left.
    bool settled(size_t connections) {
        for (int i = 0; i < 6000; ++i) {
            if (server_->stats().connections == connections && server_->wait_idle(milliseconds(0))) {
                return true;
            }
            std::this_thread::sleep_for(milliseconds(10));
        }
        return false;
    }

    Parked parked_;
    std::unique_ptr<HttpServer> server_;
};

std::string hello(int port, const std::string& fields = "", const std::string& method = "GET") {
    return method + " /hello HTTP/1.1\r\nHost: localhost:" + std::to_string(port) + "\r\n" + fields + "\r\n";
}

std::string post(int port, const std::string& path, const std::string& body, const std::string& fields = "") {
    return "POST " + path + " HTTP/1.1\r\nHost: localhost:" + std::to_string(port) + "\r\n" + fields +
           "Content-Length: " + std::to_string(body.size()) + "\r\n\r\n" + body;
}

TEST_F(HttpServerTest, AnswersAndKeepsAlive) {
    serve();
    TestClient client(server_->port());
    for (int i = 0; i < 3; ++i) {
        const TestAnswer answer = client.ask(hello(server_->port(), "X-Request-Id: id-7\r\n"));
        EXPECT_EQ(answer.status, 200);
        EXPECT_EQ(answer.body, "hello");
        EXPECT_EQ(answer.field("Content-Type"), "text/plain");
        EXPECT_EQ(answer.field("X-Extra"), "1");
        EXPECT_EQ(answer.field("X-Request-Id"), "id-7");
        EXPECT_EQ(answer.field("Connection"), "");
    }
    const TestAnswer last = client.ask(hello(server_->port(), "Connection: close\r\n"));
    EXPECT_EQ(last.field("Connection"), "close");
    EXPECT_TRUE(last.field("X-Request-Id").starts_with("req-"));
    EXPECT_TRUE(client.closed_by_server());
}

TEST_F(HttpServerTest, Http10) {
    serve();
    const std::string host = "Host: localhost:" + std::to_string(server_->port()) + "\r\n";
    TestClient client(server_->port());
    EXPECT_EQ(
        client.ask("GET /hello HTTP/1.0\r\nConnection: keep-alive\r\n" + host + "\r\n").field("Connection"),
        "keep-alive");
    const TestAnswer answer = client.ask("GET /stream HTTP/1.0\r\n" + host + "\r\n");
    EXPECT_EQ(answer.field("Transfer-Encoding"), "");
    EXPECT_EQ(answer.field("Connection"), "close");
    EXPECT_EQ(answer.body, "one two");
}

TEST_F(HttpServerTest, Head) {
    serve();
    TestClient client(server_->port());
    client.send(hello(server_->port(), "", "HEAD"));
    const TestAnswer answer = client.read_answer(true);
    EXPECT_EQ(answer.status, 200);
    EXPECT_EQ(answer.field("Content-Length"), "5");
    EXPECT_EQ(client.ask(hello(server_->port())).body, "hello");  // nothing stood between
}

TEST_F(HttpServerTest, UnknownPathsAndMethods) {
    serve();
    const std::string host = "Host: localhost:" + std::to_string(server_->port()) + "\r\n\r\n";
    TestClient client(server_->port());
    const TestAnswer unknown = client.ask("GET /nothing HTTP/1.1\r\n" + host);
    EXPECT_EQ(unknown.status, 404);
    EXPECT_EQ(unknown.body,
              R"({"error":{"message":"unknown path: GET /nothing","type":"not_found_error","param":null,)"
              R"("code":"unknown_url"}})");
    const TestAnswer method = client.ask("PUT /hello HTTP/1.1\r\n" + host);
    EXPECT_EQ(method.status, 405);
    EXPECT_EQ(method.field("Allow"), "GET, HEAD");
    EXPECT_EQ(client.ask(hello(server_->port())).status, 200);  // on the same connection
}

TEST_F(HttpServerTest, ChunkedBody) {
    serve();
    TestClient client(server_->port());
    const std::string head = "POST /echo HTTP/1.1\r\nHost: localhost:" + std::to_string(server_->port()) +
                             "\r\nTransfer-Encoding: chunked\r\n\r\n";
    EXPECT_EQ(client.ask(head + "5\r\nhello\r\n6\r\n world\r\n0\r\n\r\n").body, "hello world");
    for (const char c : head + "3\r\nabc\r\n0\r\n\r\n") {
        client.send(std::string_view(&c, 1));
    }
    EXPECT_EQ(client.read_answer().body, "abc");
    EXPECT_EQ(client.ask(head + "zz\r\n").status, 400);
    EXPECT_TRUE(client.closed_by_server());
}

TEST_F(HttpServerTest, Limits) {
    serve({.body_bytes_max = 100, .header_bytes_max = 512});
    TestClient long_header(server_->port());
    EXPECT_EQ(long_header.ask(hello(server_->port(), "A: " + std::string(2000, 'a') + "\r\n")).status, 431);
    EXPECT_TRUE(long_header.closed_by_server());
    // The answer comes though the client sends all of its body first.
    TestClient large(server_->port());
    const TestAnswer answer = large.ask(post(server_->port(), "/echo", std::string(3'000'000, 'a')));
    EXPECT_EQ(answer.status, 413);
    EXPECT_NE(answer.body.find("100 bytes"), std::string::npos);
    TestClient fits(server_->port());
    EXPECT_EQ(fits.ask(post(server_->port(), "/echo", std::string(100, 'a'))).status, 200);
}

TEST_F(HttpServerTest, Pipelining) {
    serve();
    TestClient client(server_->port());
    std::string requests;
    for (int i = 0; i < 50; ++i) {
        requests += post(server_->port(), "/echo", "body " + std::to_string(i));
    }
    client.send(post(server_->port(), "/park", "") + requests);
    const Exchange parked = parked_.take();
    ASSERT_NE(parked, nullptr);
    Signal disconnected;
    parked->on_disconnect([&] { disconnected.raise(); });
    EXPECT_FALSE(disconnected.wait(milliseconds(50)));  // bytes of later requests are no disconnect
    parked->respond(200, "text/plain", "first");
    EXPECT_EQ(client.read_answer().body, "first");
    for (int i = 0; i < 50; ++i) {
        EXPECT_EQ(client.read_answer().body, "body " + std::to_string(i));
    }
    EXPECT_FALSE(disconnected.wait(milliseconds(0)));
}

TEST_F(HttpServerTest, ManyPipelinedBytesAreKept) {
    serve();
    TestClient client(server_->port());
    const std::string large(300'000, 'x');
    std::thread sender(
        [&] { client.send(post(server_->port(), "/park", "") + post(server_->port(), "/echo", large)); });
    const Exchange parked = parked_.take();
    ASSERT_NE(parked, nullptr);
    parked->respond(200, "text/plain", "first");
    EXPECT_EQ(client.read_answer().body, "first");
    EXPECT_EQ(client.read_answer().body, large);
    sender.join();
}

TEST_F(HttpServerTest, ExpectContinue) {
    serve({.api_keys = {"key"}, .body_bytes_max = 100});
    const auto head = [&](const std::string& length, const std::string& fields) {
        return "POST /echo HTTP/1.1\r\nHost: localhost:" + std::to_string(server_->port()) +
               "\r\nContent-Length: " + length + "\r\n" + fields + "\r\n";
    };
    const std::string key = "Authorization: Bearer key\r\n";
    TestClient client(server_->port());
    EXPECT_EQ(client.ask(head("5", key + "Expect: 100-continue\r\n")).status, 100);
    EXPECT_EQ(client.ask("hello").body, "hello");
    // What the header rules out is said instead of 100.
    EXPECT_EQ(TestClient(server_->port()).ask(head("5", "Expect: 100-continue\r\n")).status, 401);
    EXPECT_EQ(TestClient(server_->port()).ask(head("500", key + "Expect: 100-continue\r\n")).status, 413);
    EXPECT_EQ(TestClient(server_->port()).ask(head("5", key + "Expect: the-unexpected\r\n")).status, 417);
}

TEST_F(HttpServerTest, SlowRequestsAreCut) {
    serve({.header_timeout = milliseconds(200),
           .body_timeout = milliseconds(200),
           .idle_timeout = milliseconds(200)});
    TestClient silent(server_->port());
    EXPECT_TRUE(silent.closed_by_server());
    // A byte now and then does not keep the connection.
    TestClient slow(server_->port());
    std::atomic<bool> stop = false;
    std::thread sender([&] {
        slow.send("GET /hello HTTP/1.1\r\n");
        while (!stop && slow.send("A: b\r\n")) {
            std::this_thread::sleep_for(milliseconds(20));
        }
    });
    EXPECT_EQ(slow.read_answer().status, 408);
    stop = true;
    sender.join();
    TestClient body(server_->port());
    body.send("POST /echo HTTP/1.1\r\nHost: localhost:" + std::to_string(server_->port()) +
              "\r\nContent-Length: 9\r\n\r\nab");
    EXPECT_EQ(body.read_answer().status, 408);
    TestClient idle(server_->port());
    EXPECT_EQ(idle.ask(hello(server_->port())).status, 200);
    EXPECT_TRUE(idle.closed_by_server());
    EXPECT_TRUE(settled(0) || server_->stats().connections <= 3);
}

TEST_F(HttpServerTest, HalfClosedClientGetsItsAnswer) {
    serve();
    TestClient client(server_->port());
    client.send(hello(server_->port()) + post(server_->port(), "/echo", "second"));
    client.half_close();
    EXPECT_EQ(client.read_answer().body, "hello");
    EXPECT_EQ(client.read_answer().body, "second");
    EXPECT_TRUE(client.closed_by_server());
}

TEST_F(HttpServerTest, DisconnectIsTold) {
    serve();
    for (const bool reset : {false, true}) {
        TestClient client(server_->port());
        client.send(post(server_->port(), "/park", ""));
        const Exchange exchange = parked_.take();
        ASSERT_NE(exchange, nullptr);
        Signal disconnected;
        exchange->on_disconnect([&] { disconnected.raise(); });
        exchange->start_stream(200, "text/event-stream");
        EXPECT_TRUE(exchange->write("x"));
        reset ? client.reset() : client.close();
        EXPECT_TRUE(disconnected.wait());
        EXPECT_FALSE(exchange->write("y"));
        exchange->end();
        EXPECT_TRUE(settled(0));
    }
}

TEST_F(HttpServerTest, DisconnectBeforeAskingIsToldAtOnce) {
    serve();
    TestClient client(server_->port());
    client.send(post(server_->port(), "/park", ""));
    const Exchange exchange = parked_.take();
    ASSERT_NE(exchange, nullptr);
    client.reset();
    Signal disconnected;
    EXPECT_TRUE(settled(0));
    exchange->on_disconnect([&] { disconnected.raise(); });
    EXPECT_TRUE(disconnected.wait());
}

TEST_F(HttpServerTest, NoDisconnectAfterACompleteAnswer) {
    serve();
    Signal disconnected;
    {
        TestClient client(server_->port());
        client.send(post(server_->port(), "/park", ""));
        const Exchange exchange = parked_.take();
        ASSERT_NE(exchange, nullptr);
        exchange->on_disconnect([&] { disconnected.raise(); });
        exchange->respond(200, "text/plain", "done");
        EXPECT_EQ(client.read_answer().body, "done");
        exchange->on_disconnect([&] { disconnected.raise(); });
    }
    EXPECT_TRUE(settled(0));
    EXPECT_FALSE(disconnected.wait(milliseconds(0)));
}

TEST_F(HttpServerTest, ClientThatDoesNotReadIsCut) {
    serve({.write_queue_bytes_max = 64 << 10});
    TestClient client(server_->port(), 4096);
    client.send(post(server_->port(), "/park", ""));
    const Exchange exchange = parked_.take();
    ASSERT_NE(exchange, nullptr);
    Signal disconnected;
    exchange->on_disconnect([&] { disconnected.raise(); });
    exchange->start_stream(200, "text/event-stream");
    const std::string piece(1000, 'x');
    size_t written = 0;
    while (exchange->write(piece)) {
        written += piece.size();
        ASSERT_LT(written, size_t{1} << 30);
        std::this_thread::yield();
    }
    EXPECT_TRUE(disconnected.wait());
    EXPECT_TRUE(settled(0));
}

TEST_F(HttpServerTest, WriteWithoutProgressIsCut) {
    serve({.write_timeout = milliseconds(200)});
    TestClient client(server_->port(), 4096);
    client.send(post(server_->port(), "/park", ""));
    const Exchange exchange = parked_.take();
    ASSERT_NE(exchange, nullptr);
    // One answer may be larger than the queue's bound, but not wait for ever.
    exchange->respond(200, "text/plain", std::string(64 << 20, 'x'));
    EXPECT_TRUE(settled(0));
}

TEST_F(HttpServerTest, LargeAnswerReachesASlowReader) {
    serve({.write_queue_bytes_max = 1 << 10});
    TestClient client(server_->port());
    client.send(post(server_->port(), "/park", ""));
    const Exchange exchange = parked_.take();
    ASSERT_NE(exchange, nullptr);
    exchange->respond(200, "text/plain", std::string(8 << 20, 'x'));
    EXPECT_EQ(client.read_answer().body.size(), size_t{8} << 20);
}

TEST_F(HttpServerTest, StreamsInOrder) {
    serve({.io_threads = 2});
    TestClient client(server_->port());
    EXPECT_EQ(
        client.ask("GET /stream HTTP/1.1\r\nHost: localhost:" + std::to_string(server_->port()) + "\r\n\r\n")
            .body,
        "one two");
    client.send(post(server_->port(), "/park", ""));
    const Exchange exchange = parked_.take();
    ASSERT_NE(exchange, nullptr);
    exchange->start_stream(200, "text/event-stream");
    std::string expected;
    std::thread writer([&] {
        for (int i = 0; i < 2000; ++i) {
            const std::string piece = std::to_string(i) + "\n";
            expected += piece;
            EXPECT_TRUE(exchange->write(piece));
        }
        exchange->end();
    });
    const TestAnswer answer = client.read_answer();
    writer.join();
    EXPECT_TRUE(answer.whole);
    EXPECT_EQ(answer.body, expected);
}

TEST_F(HttpServerTest, HandlerThatDoesNotAnswer) {
    serve();
    TestClient client(server_->port());
    const std::string request =
        "GET /dropped HTTP/1.1\r\nHost: localhost:" + std::to_string(server_->port()) + "\r\n\r\n";
    EXPECT_EQ(client.ask(request).status, 500);
    // A stream that is let go is cut, not ended.
    client.send(post(server_->port(), "/park", ""));
    Exchange exchange = parked_.take();
    ASSERT_NE(exchange, nullptr);
    exchange->start_stream(200, "text/event-stream");
    exchange->write("x");
    exchange.reset();
    EXPECT_FALSE(client.read_answer().whole);
}

TEST_F(HttpServerTest, After) {
    serve();
    TestClient client(server_->port());
    client.send(post(server_->port(), "/park", ""));
    const Exchange exchange = parked_.take();
    ASSERT_NE(exchange, nullptr);
    Signal ran;
    auto never = std::make_shared<Signal>();
    exchange->after(milliseconds(1), [&] { ran.raise(); });
    exchange->after(milliseconds(30'000), [never] { never->raise(); });
    EXPECT_TRUE(ran.wait());
    exchange->respond(200, "text/plain", "done");
    EXPECT_EQ(client.read_answer().status, 200);
    EXPECT_EQ(client.ask(hello(server_->port())).status, 200);
    EXPECT_EQ(never.use_count(), 1);  // the end of the exchange has freed the task
    exchange->after(milliseconds(0), [never] { never->raise(); });
    EXPECT_FALSE(never->wait(milliseconds(50)));
}

}  // namespace
}  // namespace tessera

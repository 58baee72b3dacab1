// Connections in number, TLS, access, drain and the end.
#include <atomic>
#include <chrono>
#include <cstdio>
#include <filesystem>
#include <future>
#include <gtest/gtest.h>
#include <memory>
#include <openssl/evp.h>
#include <openssl/pem.h>
#include <openssl/ssl.h>
#include <openssl/x509.h>
#include <string>
#include <thread>
#include <vector>

#include "server/http/test_client.h"
#include "server/http_server.h"

namespace tessera {
namespace {

using std::chrono::milliseconds;
using Exchange = std::shared_ptr<HttpExchange>;

std::unique_ptr<HttpServer> make_server(HttpServerConfig config) {
    config.port = 0;
    Result<std::unique_ptr<HttpServer>> made = HttpServer::create(config);
    EXPECT_TRUE(made.ok()) << made.status().message();
    if (!made.ok()) {
        return nullptr;
    }
    made.value()->add_route({.method = "GET", .path = "/hello", .handler = [](Exchange exchange) {
                                 exchange->respond(200, "text/plain", exchange->request().tenant + "hello");
                             }});
    made.value()->add_route(
        {.method = "GET",
         .path = "/health",
         .handler = [](Exchange exchange) { exchange->respond(200, "application/json", "{}"); },
         .open = true});
    return made.take();
}

std::string get(const HttpServer& server, const std::string& path = "/hello",
                const std::string& fields = "") {
    return "GET " + path + " HTTP/1.1\r\nHost: localhost:" + std::to_string(server.port()) + "\r\n" + fields +
           "\r\n";
}

TEST(HttpServerLimits, BindErrorNamesTheAddress) {
    const auto first = make_server({});
    ASSERT_NE(first, nullptr);
    const auto second = HttpServer::create({.port = first->port()});
    ASSERT_FALSE(second.ok());
    EXPECT_NE(second.status().message().find("127.0.0.1:" + std::to_string(first->port())),
              std::string::npos);
    EXPECT_NE(second.status().message().find("in use"), std::string::npos);
    const auto nowhere = HttpServer::create({.host = "no.such.host.invalid", .port = 0});
    ASSERT_FALSE(nowhere.ok());
    EXPECT_NE(nowhere.status().message().find("no.such.host.invalid"), std::string::npos);
    EXPECT_FALSE(HttpServer::create({.port = 0, .tls_cert_file = "cert.pem"}).ok());
    const auto no_file =
        HttpServer::create({.port = 0, .tls_cert_file = "/none/c.pem", .tls_key_file = "/none/k.pem"});
    ASSERT_FALSE(no_file.ok());
    EXPECT_NE(no_file.status().message().find("/none/c.pem"), std::string::npos);
}

TEST(HttpServerLimits, ManyClientsAtOnce) {
    const auto server = make_server({.io_threads = 2, .worker_threads = 3});
    ASSERT_NE(server, nullptr);
    server->start();
    std::atomic<int> answered = 0;
    std::vector<std::thread> threads;
    for (int t = 0; t < 8; ++t) {
        threads.emplace_back([&] {
            std::vector<std::unique_ptr<TestClient>> clients;
            for (int i = 0; i < 30; ++i) {
                clients.push_back(std::make_unique<TestClient>(server->port()));
            }
            for (int round = 0; round < 3; ++round) {
                for (const auto& client : clients) {
                    client->send(get(*server));
                }
                for (const auto& client : clients) {
                    answered += client->read_answer().body == "hello" ? 1 : 0;
                }
            }
        });
    }
    for (std::thread& thread : threads) {
        thread.join();
    }
    EXPECT_EQ(answered, 8 * 30 * 3);
}

TEST(HttpServerLimits, TooManyConnectionsAreRefused) {
    const auto server = make_server({.connections_max = 2});
    ASSERT_NE(server, nullptr);
    server->start();
    TestClient first(server->port());
    TestClient second(server->port());
    EXPECT_EQ(first.ask(get(*server)).status, 200);
    EXPECT_EQ(second.ask(get(*server)).status, 200);
    TestClient third(server->port());
    const TestAnswer refused = third.ask(get(*server));
    EXPECT_EQ(refused.status, 503);
    EXPECT_EQ(refused.field("Retry-After"), "1");
    EXPECT_EQ(refused.field("Connection"), "close");
    first.close();
    third.close();
    for (int i = 0; i < 6000 && server->stats().connections > 1; ++i) {
        std::this_thread::sleep_for(milliseconds(10));
    }
    EXPECT_EQ(TestClient(server->port()).ask(get(*server)).status, 200);
}

TEST(HttpServerLimits, WaitingHandlersAreBounded) {
    HttpServerConfig config{.port = 0, .worker_threads = 1, .pending_handlers_max = 2};
    Result<std::unique_ptr<HttpServer>> made = HttpServer::create(config);
    ASSERT_TRUE(made.ok());
    const std::unique_ptr<HttpServer> server = made.take();
    std::atomic<bool> stop = false;
    server->add_route({.method = "GET", .path = "/hello", .handler = [&](Exchange exchange) {
                           while (!stop) {
                               std::this_thread::sleep_for(milliseconds(1));
                           }
                           exchange->respond(200, "text/plain", "hello");
                       }});
    server->add_route({.method = "GET",
                       .path = "/health",
                       .handler = [](Exchange exchange) { exchange->respond(200, "application/json", "{}"); },
                       .open = true});
    server->start();
    std::vector<std::unique_ptr<TestClient>> clients;
    for (int i = 0; i < 10; ++i) {
        clients.push_back(std::make_unique<TestClient>(server->port()));
        clients.back()->send(get(*server));
    }
    int overloaded = 0;
    int ok = 0;
    // One runs and two wait (or one more, when the first was taken late); the others hear of it at once.
    for (int i = 0; i < 10; ++i) {
        while (server->stats().exchanges > 3) {
            std::this_thread::sleep_for(milliseconds(1));
        }
    }
    // Probes have a lane of their own.
    EXPECT_EQ(TestClient(server->port()).ask(get(*server, "/health")).status, 200);
    stop = true;
    for (const auto& client : clients) {
        const TestAnswer answer = client->read_answer();
        ok += answer.status == 200 ? 1 : 0;
        overloaded += answer.status == 503 && answer.field("Retry-After") == "1" ? 1 : 0;
    }
    EXPECT_EQ(ok + overloaded, 10);
    EXPECT_GE(overloaded, 7);
    EXPECT_GE(ok, 2);
}

TEST(HttpServerLimits, KeysAndTenants) {
    const auto server = make_server({.api_keys = {"secret"}});
    ASSERT_NE(server, nullptr);
    server->start();
    TestClient client(server->port());
    const TestAnswer refused = client.ask(get(*server));
    EXPECT_EQ(refused.status, 401);
    EXPECT_EQ(refused.field("WWW-Authenticate"), "Bearer");
    EXPECT_NE(refused.body.find("\"code\":\"invalid_api_key\""), std::string::npos);
    EXPECT_EQ(client.ask(get(*server, "/health")).status, 200);
    const TestAnswer allowed = client.ask(get(*server, "/hello", "Authorization: Bearer secret\r\n"));
    EXPECT_EQ(allowed.status, 200);
    EXPECT_EQ(allowed.body.size(), 64 + 5u);
    EXPECT_EQ(allowed.body.find("secret"), std::string::npos);
}

TEST(HttpServerLimits, CorsOnlyForListedOrigins) {
    const auto server = make_server({.allowed_origins = {"https://app.example"}});
    ASSERT_NE(server, nullptr);
    server->start();
    TestClient client(server->port());
    EXPECT_EQ(client.ask(get(*server)).field("Access-Control-Allow-Origin"), "");
    const TestAnswer listed = client.ask(get(*server, "/hello", "Origin: https://app.example\r\n"));
    EXPECT_EQ(listed.status, 200);
    EXPECT_EQ(listed.field("Access-Control-Allow-Origin"), "https://app.example");
    EXPECT_EQ(client.ask(get(*server, "/hello", "Origin: https://evil.example\r\n")).status, 403);
    const TestAnswer preflight =
        client.ask("OPTIONS /hello HTTP/1.1\r\nHost: localhost\r\nOrigin: https://app.example\r\n\r\n");
    EXPECT_EQ(preflight.status, 204);
    EXPECT_EQ(preflight.field("Access-Control-Allow-Methods"), "GET, HEAD");
    EXPECT_EQ(client.ask(get(*server)).status, 200);
}

TEST(HttpServerLimits, DrainClosesConnections) {
    const auto server = make_server({});
    ASSERT_NE(server, nullptr);
    server->start();
    TestClient idle(server->port());
    EXPECT_EQ(idle.ask(get(*server)).status, 200);
    server->drain();
    EXPECT_TRUE(idle.closed_by_server());
    TestClient late(server->port());
    const TestAnswer answer = late.ask(get(*server));
    EXPECT_EQ(answer.status, 200);
    EXPECT_EQ(answer.field("Connection"), "close");
    EXPECT_TRUE(late.closed_by_server());
    server->stop_accepting();
    EXPECT_TRUE(server->wait_idle(milliseconds(60'000)));
    server->close();
    server->close();
}

TEST(HttpServerLimits, ExchangesMayOutliveTheServer) {
    auto server = make_server({});
    ASSERT_NE(server, nullptr);
    std::atomic<bool> disconnected = false;
    std::promise<Exchange> handed;
    server->add_route({.method = "GET", .path = "/park", .handler = [&](Exchange exchange) {
                           exchange->on_disconnect([&] { disconnected = true; });
                           exchange->start_stream(200, "text/plain");
                           exchange->after(milliseconds(60'000), [] {});
                           handed.set_value(std::move(exchange));
                       }});
    server->start();
    TestClient client(server->port());
    client.send(get(*server, "/park"));
    Exchange exchange = handed.get_future().get();
    EXPECT_FALSE(server->wait_idle(milliseconds(1)));
    server.reset();
    EXPECT_TRUE(disconnected);
    EXPECT_FALSE(exchange->write("x"));
    exchange->after(milliseconds(1), [] {});
    exchange->on_disconnect([] {});
    exchange->end();
    exchange.reset();
    EXPECT_FALSE(client.read_answer().whole);
}

// ---- TLS

struct Freer {
    void operator()(EVP_PKEY* key) const { EVP_PKEY_free(key); }
    void operator()(X509* cert) const { X509_free(cert); }
    void operator()(SSL_CTX* context) const { SSL_CTX_free(context); }
    void operator()(SSL* ssl) const { SSL_free(ssl); }
    void operator()(std::FILE* file) const { std::fclose(file); }
};
template <typename T>
using Owned = std::unique_ptr<T, Freer>;

// A key and a certificate signed by itself, in PEM files.
void write_certificate(const std::string& cert_file, const std::string& key_file) {
    const Owned<EVP_PKEY> key(EVP_EC_gen("P-256"));
    const Owned<X509> cert(X509_new());
    ASN1_INTEGER_set(X509_get_serialNumber(cert.get()), 1);
    X509_gmtime_adj(X509_getm_notBefore(cert.get()), 0);
    X509_gmtime_adj(X509_getm_notAfter(cert.get()), 3600);
    X509_set_pubkey(cert.get(), key.get());
    X509_NAME* name = X509_get_subject_name(cert.get());
    X509_NAME_add_entry_by_txt(name, "CN", MBSTRING_ASC, reinterpret_cast<const unsigned char*>("localhost"),
                               -1, -1, 0);
    X509_set_issuer_name(cert.get(), name);
    ASSERT_NE(X509_sign(cert.get(), key.get(), EVP_sha256()), 0);
    const Owned<std::FILE> cert_out(std::fopen(cert_file.c_str(), "wb"));
    ASSERT_EQ(PEM_write_X509(cert_out.get(), cert.get()), 1);
    const Owned<std::FILE> key_out(std::fopen(key_file.c_str(), "wb"));
    ASSERT_EQ(PEM_write_PrivateKey(key_out.get(), key.get(), nullptr, nullptr, 0, nullptr, nullptr), 1);
}

TEST(HttpServerTls, Answers) {
    const std::filesystem::path folder = std::filesystem::path(testing::TempDir()) / "tessera_tls_test";
    std::filesystem::create_directories(folder);
    const std::string cert = folder / "cert.pem";
    const std::string key = folder / "key.pem";
    write_certificate(cert, key);
    const auto server = make_server({.tls_cert_file = cert, .tls_key_file = key});
    ASSERT_NE(server, nullptr);
    server->start();
    EXPECT_TRUE(server->url().starts_with("https://"));

    TestClient socket(server->port());
    const Owned<SSL_CTX> context(SSL_CTX_new(TLS_client_method()));
    const Owned<SSL> ssl(SSL_new(context.get()));
    SSL_set_fd(ssl.get(), socket.fd());
    ASSERT_EQ(SSL_connect(ssl.get()), 1);
    for (int i = 0; i < 2; ++i) {
        const std::string request = get(*server, "/hello", i == 1 ? "Connection: close\r\n" : "");
        ASSERT_EQ(SSL_write(ssl.get(), request.data(), static_cast<int>(request.size())),
                  static_cast<int>(request.size()));
        std::string answer;
        char buffer[1024];
        while (!answer.ends_with("hello")) {
            const int n = SSL_read(ssl.get(), buffer, sizeof buffer);
            ASSERT_GT(n, 0);
            answer.append(buffer, static_cast<size_t>(n));
        }
        EXPECT_TRUE(answer.starts_with("HTTP/1.1 200 OK\r\n"));
    }
    // The server ends the connection properly: with close_notify.
    char byte = 0;
    EXPECT_EQ(SSL_read(ssl.get(), &byte, 1), 0);
    EXPECT_EQ(SSL_get_error(ssl.get(), 0), SSL_ERROR_ZERO_RETURN);

    // A client that speaks plain HTTP to it is let go.
    TestClient plain(server->port());
    plain.send(get(*server));
    plain.read_to_end();
    EXPECT_EQ(server->wait_idle(milliseconds(60'000)), true);
    std::filesystem::remove_all(folder);
}

}  // namespace
}  // namespace tessera

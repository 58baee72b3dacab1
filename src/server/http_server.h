// HttpServer: HTTP/1.1 and 1.0 over TCP or TLS. I/O threads read, check and write; handlers run on worker
// threads (http.h says what they see). A request reaches its handler only after every check that the headers
// allow: route, method, API key, Host and Origin, content type, sizes.
#pragma once

#include <chrono>
#include <memory>
#include <string>

#include "base/status.h"
#include "server/http.h"

namespace tessera {

struct HttpServerStats {
    size_t connections = 0;
    size_t exchanges = 0;  // requests whose answer is not complete
};

// Ownership: the server owns its threads. Exchanges that outlive it are harmless: their calls do nothing.
// Order of calls: create, add_route..., start, [drain, wait_idle], close.
class HttpServer {
  public:
    // Binds and listens (connections queue up until start()). The error names the address and the reason.
    static Result<std::unique_ptr<HttpServer>> create(HttpServerConfig config);
    ~HttpServer();  // close()
    HttpServer(const HttpServer&) = delete;
    HttpServer& operator=(const HttpServer&) = delete;

    // REQUIRES: before start(). A path may have several methods; a GET route answers HEAD too.
    void add_route(HttpRoute route);
    void start();

    int port() const;         // the one bound, also when port 0 was asked for
    std::string url() const;  // "http://127.0.0.1:8000"
    HttpServerStats stats() const;

    // From now on every answer carries `Connection: close` and idle connections are closed. New connections
    // are still served: probes want to hear that the server is not ready, and clients the 503 of the
    // handlers.
    void drain();
    // No new connections from now on.
    void stop_accepting();
    // Waits until no exchange is open; false when the time is over.
    bool wait_idle(std::chrono::milliseconds timeout);
    // Cuts what is left (its on_disconnect callbacks run) and joins the threads. Idempotent.
    void close();

  private:
    struct Impl;
    std::unique_ptr<Impl> impl_;

  public:
    explicit HttpServer(std::unique_ptr<Impl> impl);  // create() makes it
};

}  // namespace tessera

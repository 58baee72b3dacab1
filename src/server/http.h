// The HTTP layer's border: what a handler sees. Beast is hidden behind it (http_server.cc).
#pragma once

#include <chrono>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace tessera {

struct HttpRequest {
    std::string method;  // "GET"
    std::string path;    // without the query
    std::string query;
    std::vector<std::pair<std::string, std::string>> headers;  // names in lower case
    std::string body;
    std::string
        request_id;      // X-Request-Id as given (checked: printable, at most 128 bytes), or one that we made
    std::string tenant;  // a digest of the API key that was used; empty without keys

    std::string_view header(std::string_view lower_case_name) const;  // empty when absent
};

using HttpHeaders = std::vector<std::pair<std::string, std::string>>;

// One request and its answer. Every member may be called from any thread; calls after the client has gone do
// nothing. Exactly one of respond() and start_stream() is called, once. A handler that lets go of the
// exchange without an answer answers 500.
class HttpExchange {
  public:
    virtual ~HttpExchange() = default;
    virtual const HttpRequest& request() const = 0;
    virtual void respond(int status, std::string content_type, std::string body,
                         HttpHeaders headers = {}) = 0;
    // A chunked answer; write() pieces, then end(). Pieces are queued and written in order, several in one
    // system call when they queue up. False: the client is gone, or did not read and its queue is over the
    // bound, and was cut.
    virtual void start_stream(int status, std::string content_type, HttpHeaders headers = {}) = 0;
    virtual bool write(std::string piece) = 0;
    virtual void end() = 0;
    // Called once, from an I/O thread, when the client goes away before the answer is complete (at once if it
    // has gone).
    virtual void on_disconnect(std::function<void()> callback) = 0;
    // Runs `task` on an I/O thread after `delay`, unless the exchange is over by then (for pings and
    // deadlines).
    virtual void after(std::chrono::milliseconds delay, std::function<void()> task) = 0;
};

// Runs on a worker thread (not on an I/O thread): it may tokenise, but must not wait for the engine.
using HttpHandler = std::function<void(std::shared_ptr<HttpExchange>)>;

struct HttpRoute {
    std::string method;
    std::string path;
    HttpHandler handler;
    bool open = false;       // no API key needed
    bool json_body = false;  // requires content-type application/json, and the Origin and Host checks
};

struct HttpServerConfig {
    std::string host = "127.0.0.1";
    int port = 8000;                          // 0 = any free port
    std::string tls_cert_file, tls_key_file;  // both or none
    std::vector<std::string> api_keys;
    std::vector<std::string> allowed_origins;  // beside the server's own; no CORS headers for others
    std::vector<std::string> allowed_hosts;    // Host names accepted beside the bound address and localhost
    int io_threads = 1;
    int worker_threads = 2;
    size_t body_bytes_max = size_t{8} << 20;
    size_t header_bytes_max = size_t{32} << 10;
    size_t connections_max = 1024;
    size_t write_queue_bytes_max = size_t{1} << 20;
    size_t pending_handlers_max = 1024;  // beyond it: 503 with Retry-After
    std::chrono::milliseconds header_timeout{10'000};
    std::chrono::milliseconds body_timeout{30'000};
    std::chrono::milliseconds idle_timeout{75'000};   // keep-alive
    std::chrono::milliseconds write_timeout{30'000};  // no progress of a write
    bool log_requests =
        false;  // a line for each answer: id, method, path, status, time; never a body or a query
};

}  // namespace tessera

// Server: the HTTP server with every route of ours on it, over one engine.
#pragma once

#include <atomic>
#include <chrono>
#include <memory>
#include <string>

#include "base/status.h"
#include "engine/engine.h"
#include "server/http_server.h"
#include "server/metrics.h"
#include "server/openai_service.h"
#include "text/tokenizer.h"

namespace tessera {

struct ServerParts {
    OpenAiConfig openai;
    MetricsConfig metrics;
    Engine& engine;
    const Tokenizer& tokenizer;
};

// Lifetime: the engine is destroyed after shutdown() and before the server, since its last events still
// report to the server's metrics. Declare the server first.
class Server {
  public:
    // Takes the address, before a model is loaded for nothing.
    static Result<std::unique_ptr<Server>> bind(HttpServerConfig config);
    explicit Server(std::unique_ptr<HttpServer> http);  // bind() makes it
    ~Server();

    void start(ServerParts parts);
    int port() const { return http_->port(); }
    std::string url() const { return http_->url(); }

    // Not ready and no admission from now on (503 with Retry-After, Connection: close); waits up to `drain`
    // for running answers, then aborts them (a stream ends with its error event), and closes. REQUIRES:
    // started.
    void shutdown(std::chrono::milliseconds drain);

  private:
    std::unique_ptr<HttpServer> http_;
    std::unique_ptr<ServerMetrics> metrics_;
    std::unique_ptr<OpenAiService> openai_;
    Engine* engine_ = nullptr;
    std::atomic<bool> draining_ = false;
};

}  // namespace tessera

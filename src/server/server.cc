#include "server/server.h"

#include <fmt/format.h>
#include <utility>

#include "base/log.h"
#include "server/page_files.h"
#include "server/system_routes.h"

namespace tessera {
namespace {

// For aborted answers to write their last event to clients that read.
constexpr std::chrono::milliseconds kAbortTime{3'000};

}  // namespace

Result<std::unique_ptr<Server>> Server::bind(HttpServerConfig config) {
    Result<std::unique_ptr<HttpServer>> http = HttpServer::create(std::move(config));
    if (!http.ok()) {
        return http.status();
    }
    return std::make_unique<Server>(http.take());
}

Server::Server(std::unique_ptr<HttpServer> http) : http_(std::move(http)) {}
Server::~Server() = default;

void Server::start(ServerParts parts) {
    engine_ = &parts.engine;
    metrics_ = std::make_unique<ServerMetrics>(std::move(parts.metrics));
    openai_ = std::make_unique<OpenAiService>(std::move(parts.openai), parts.engine, parts.tokenizer,
                                              metrics_.get());
    const std::vector<HttpRoute> sets[] = {
        system_routes({.stalled_s = [this] { return engine_->stalled_s(); },
                       .ready = [this] { return !draining_ && !engine_->draining(); },
                       .engine_stats = [this] { return engine_->stats(); },
                       .metrics = metrics_.get()}),
        openai_->routes(),
        page_routes(),
    };
    for (const std::vector<HttpRoute>& routes : sets) {
        for (const HttpRoute& route : routes) {
            http_->add_route(route);
        }
    }
    http_->start();
}

void Server::shutdown(std::chrono::milliseconds drain) {
    draining_ = true;
    engine_->stop_admission();
    http_->drain();
    if (!http_->wait_idle(drain)) {
        log_warning(fmt::format("aborting {} answers that did not end within {:.1f} s",
                                http_->stats().exchanges, std::chrono::duration<double>(drain).count()));
        engine_->abort_all();
        http_->wait_idle(kAbortTime);
    }
    http_->stop_accepting();
    http_->close();
    engine_->abort_all();
}

}  // namespace tessera

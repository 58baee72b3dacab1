#include "server/system_routes.h"

#include <fmt/format.h>
#include <utility>

#include "base/clock.h"
#include "base/json.h"
#include "server/http_error.h"

namespace tessera {
namespace {

constexpr const char* kJson = "application/json";

void unavailable_answer(HttpExchange& exchange, std::string message) {
    exchange.respond(503, kJson, http_error_body({.status = 503, .message = std::move(message)}),
                     {{"Retry-After", "1"}});
}

}  // namespace

std::vector<HttpRoute> system_routes(SystemSources sources) {
    const auto shared = std::make_shared<const SystemSources>(std::move(sources));
    const auto get = [](std::string path, bool open, HttpHandler handler) {
        return HttpRoute{
            .method = "GET", .path = std::move(path), .handler = std::move(handler), .open = open};
    };
    std::vector<HttpRoute> routes;
    routes.push_back(get("/health", true, [shared](const std::shared_ptr<HttpExchange>& exchange) {
        const double stalled = shared->stalled_s();
        if (stalled >= kStalledAfter_s) {
            return unavailable_answer(
                *exchange,
                fmt::format("the step loop has not moved for {:.0f} s with work waiting", stalled));
        }
        exchange->respond(200, kJson, "{}");
    }));
    routes.push_back(get("/ready", true, [shared](const std::shared_ptr<HttpExchange>& exchange) {
        if (!shared->ready()) {
            return unavailable_answer(*exchange, "the server is shutting down and takes no new requests");
        }
        exchange->respond(200, kJson, "{}");
    }));
    routes.push_back(get("/version", true, [](const std::shared_ptr<HttpExchange>& exchange) {
        exchange->respond(200, kJson, json::dump(json::Value::object({{"version", TESSERA_VERSION}})));
    }));
    routes.push_back(get("/metrics", false, [shared](const std::shared_ptr<HttpExchange>& exchange) {
        exchange->respond(200, "text/plain; version=0.0.4; charset=utf-8",
                          shared->metrics->prometheus_text(shared->engine_stats()));
    }));
    routes.push_back(get("/stats", false, [shared](const std::shared_ptr<HttpExchange>& exchange) {
        exchange->respond(200, kJson, shared->metrics->stats_json(shared->engine_stats(), now_ns()),
                          {{"Cache-Control", "no-store"}});
    }));
    return routes;
}

}  // namespace tessera

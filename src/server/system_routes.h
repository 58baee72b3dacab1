// What an operator asks: /health, /ready, /version (open to all), /metrics, /stats.
#pragma once

#include <functional>
#include <memory>
#include <vector>

#include "engine/engine.h"
#include "server/http.h"
#include "server/metrics.h"

namespace tessera {

// The step loop counts as stuck when work waits and nothing has moved for this long.
inline constexpr double kStalledAfter_s = 10;

// Asked at each request; must be thread-safe and outlive the server.
struct SystemSources {
    std::function<double()> stalled_s;  // Engine::stalled_s
    std::function<bool()> ready;        // loaded, and not draining
    std::function<EngineStats()> engine_stats;
    const ServerMetrics* metrics = nullptr;
};

// /health: 200 {} unless the step loop is stuck, then 503 with the reason: restart it. /ready: 200 when new
// requests are taken, else 503: send them elsewhere.
std::vector<HttpRoute> system_routes(SystemSources sources);

}  // namespace tessera

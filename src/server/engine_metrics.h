// The engine's own figures as metric families, read at the scrape.
#pragma once

#include <prometheus/metric_family.h>
#include <vector>

#include "server/metrics.h"

namespace tessera {

void append_engine_metrics(std::vector<prometheus::MetricFamily>& families, const MetricsConfig& config,
                           const EngineStats& stats);

}  // namespace tessera

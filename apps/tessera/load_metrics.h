// The figures of a load test, under the names that `vllm bench serve` gives them.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "base/json.h"
#include "base/status.h"
#include "load_client.h"

namespace tessera {

// Limits in milliseconds; a request is good when it meets all that are set.
struct GoodputLimits {
    std::optional<double> ttft_ms;
    std::optional<double> tpot_ms;
    std::optional<double> e2el_ms;
    bool any() const { return ttft_ms || tpot_ms || e2el_ms; }
};

// From words such as "ttft:4000" and "tpot:50".
Result<GoodputLimits> parse_goodput(const std::vector<std::string>& words);

struct Distribution {
    double mean = 0, std = 0, p50 = 0, p90 = 0, p99 = 0;
};
// Percentiles with linear interpolation; zeros for no values.
Distribution distribution_of(std::vector<double> values);

struct LoadMetrics {
    int64_t completed = 0, failed = 0;
    int64_t input_tokens = 0, cached_tokens = 0, output_tokens = 0;
    double duration_s = 0;
    double good_requests_per_s = 0;
    int64_t concurrency_peak = 0;
    Distribution ttft, tpot, itl, e2el;  // milliseconds
};

// TTFT: from sending to the first output. TPOT: (E2EL - TTFT) / (output tokens - 1), of requests with more
// than one. ITL: all gaps between streamed outputs, pooled. Failed requests count in `failed` only.
LoadMetrics measure(const LoadOutcome& outcome, const GoodputLimits& limits);

json::Value metrics_json(const LoadMetrics& metrics, bool with_goodput);
std::string metrics_table(const LoadMetrics& metrics, bool with_goodput);
// Per request: input_lens, output_lens, ttfts, itls, errors (seconds, as vLLM saves them).
void add_details(json::Value& object, const LoadOutcome& outcome);

}  // namespace tessera

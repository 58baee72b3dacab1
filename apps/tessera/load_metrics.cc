#include "load_metrics.h"

#include <algorithm>
#include <cmath>
#include <fmt/format.h>

namespace tessera {
namespace {

double ms(TimeNs ns) {
    return static_cast<double>(ns) * 1e-6;
}

struct RequestTimes {
    double ttft_ms = 0, e2el_ms = 0;
    std::optional<double> tpot_ms;  // none with one output token
};

RequestTimes times_of(const LoadResult& result) {
    RequestTimes times;
    times.ttft_ms = ms(result.first - result.sent);
    times.e2el_ms = ms(result.finished - result.sent);
    if (result.output_tokens > 1) {
        times.tpot_ms = (times.e2el_ms - times.ttft_ms) / static_cast<double>(result.output_tokens - 1);
    }
    return times;
}

bool is_good(const RequestTimes& times, const GoodputLimits& limits) {
    return (!limits.ttft_ms || times.ttft_ms <= *limits.ttft_ms) &&
           (!limits.tpot_ms || times.tpot_ms.value_or(0) <= *limits.tpot_ms) &&
           (!limits.e2el_ms || times.e2el_ms <= *limits.e2el_ms);
}

// values must be sorted and not empty.
double percentile(const std::vector<double>& values, double fraction) {
    const double place = fraction * static_cast<double>(values.size() - 1);
    const auto below = static_cast<size_t>(place);
    const size_t above = std::min(below + 1, values.size() - 1);
    return values[below] + (values[above] - values[below]) * (place - static_cast<double>(below));
}

double per_second(int64_t count, const LoadMetrics& metrics) {
    return metrics.duration_s > 0 ? static_cast<double>(count) / metrics.duration_s : 0;
}

void add_distribution(json::Value& object, const std::string& name, const Distribution& distribution) {
    object.set("mean_" + name + "_ms", distribution.mean);
    object.set("median_" + name + "_ms", distribution.p50);
    object.set("std_" + name + "_ms", distribution.std);
    object.set("p50_" + name + "_ms", distribution.p50);
    object.set("p90_" + name + "_ms", distribution.p90);
    object.set("p99_" + name + "_ms", distribution.p99);
}

}  // namespace

Result<GoodputLimits> parse_goodput(const std::vector<std::string>& words) {
    GoodputLimits limits;
    for (const std::string& word : words) {
        const size_t colon = word.find(':');
        const std::string name = word.substr(0, colon);
        char* end = nullptr;
        const double value = colon == std::string::npos ? -1 : std::strtod(word.c_str() + colon + 1, &end);
        if (end == nullptr || *end != '\0' || !std::isfinite(value) || value <= 0 || word.ends_with(':')) {
            return invalid_argument(
                fmt::format("--goodput {}: must be NAME:MILLISECONDS, such as ttft:4000", word));
        }
        if (name == "ttft") {
            limits.ttft_ms = value;
        } else if (name == "tpot") {
            limits.tpot_ms = value;
        } else if (name == "e2el") {
            limits.e2el_ms = value;
        } else {
            return invalid_argument(fmt::format("--goodput {}: the name must be ttft, tpot or e2el", word));
        }
    }
    return limits;
}

Distribution distribution_of(std::vector<double> values) {
    Distribution distribution;
    if (values.empty()) {
        return distribution;
    }
    std::ranges::sort(values);
    const auto count = static_cast<double>(values.size());
    for (const double value : values) {
        distribution.mean += value / count;
    }
    double square = 0;
    for (const double value : values) {
        square += (value - distribution.mean) * (value - distribution.mean) / count;
    }
    distribution.std = std::sqrt(square);
    distribution.p50 = percentile(values, 0.5);
    distribution.p90 = percentile(values, 0.9);
    distribution.p99 = percentile(values, 0.99);
    return distribution;
}

LoadMetrics measure(const LoadOutcome& outcome, const GoodputLimits& limits) {
    LoadMetrics metrics;
    metrics.duration_s = outcome.duration_s;
    metrics.concurrency_peak = outcome.concurrency_peak;
    std::vector<double> ttft, tpot, itl, e2el;
    int64_t good = 0;
    for (const LoadResult& result : outcome.results) {
        if (!result.error.empty()) {
            ++metrics.failed;
            continue;
        }
        ++metrics.completed;
        metrics.input_tokens += result.prompt_tokens;
        metrics.cached_tokens += result.cached_tokens;
        metrics.output_tokens += result.output_tokens;
        const RequestTimes times = times_of(result);
        ttft.push_back(times.ttft_ms);
        e2el.push_back(times.e2el_ms);
        if (times.tpot_ms) {
            tpot.push_back(*times.tpot_ms);
        }
        for (const TimeNs gap : result.gaps) {
            itl.push_back(ms(gap));
        }
        good += is_good(times, limits);
    }
    metrics.ttft = distribution_of(std::move(ttft));
    metrics.tpot = distribution_of(std::move(tpot));
    metrics.itl = distribution_of(std::move(itl));
    metrics.e2el = distribution_of(std::move(e2el));
    metrics.good_requests_per_s = per_second(good, metrics);
    return metrics;
}

json::Value metrics_json(const LoadMetrics& metrics, bool with_goodput) {
    json::Value object = json::Value::object();
    object.set("duration", metrics.duration_s);
    object.set("completed", metrics.completed);
    object.set("failed", metrics.failed);
    object.set("total_input_tokens", metrics.input_tokens);
    object.set("total_cached_tokens", metrics.cached_tokens);
    object.set("total_output_tokens", metrics.output_tokens);
    object.set("request_throughput", per_second(metrics.completed, metrics));
    if (with_goodput) {
        object.set("request_goodput", metrics.good_requests_per_s);
    }
    object.set("output_throughput", per_second(metrics.output_tokens, metrics));
    object.set("total_token_throughput", per_second(metrics.input_tokens + metrics.output_tokens, metrics));
    object.set("max_concurrent_requests", metrics.concurrency_peak);
    add_distribution(object, "ttft", metrics.ttft);
    add_distribution(object, "tpot", metrics.tpot);
    add_distribution(object, "itl", metrics.itl);
    add_distribution(object, "e2el", metrics.e2el);
    return object;
}

std::string metrics_table(const LoadMetrics& metrics, bool with_goodput) {
    std::string out;
    const auto line = [&](std::string_view name, double value, int digits) {
        out += fmt::format("{:<32} {:>12.{}f}\n", name, value, digits);
    };
    line("completed requests", static_cast<double>(metrics.completed), 0);
    line("failed requests", static_cast<double>(metrics.failed), 0);
    line("duration (s)", metrics.duration_s, 2);
    line("most requests at once", static_cast<double>(metrics.concurrency_peak), 0);
    line("input tokens", static_cast<double>(metrics.input_tokens), 0);
    line("  of these from the cache", static_cast<double>(metrics.cached_tokens), 0);
    line("output tokens", static_cast<double>(metrics.output_tokens), 0);
    line("requests/s", per_second(metrics.completed, metrics), 2);
    if (with_goodput) {
        line("good requests/s", metrics.good_requests_per_s, 2);
    }
    line("output tokens/s", per_second(metrics.output_tokens, metrics), 2);
    line("all tokens/s", per_second(metrics.input_tokens + metrics.output_tokens, metrics), 2);
    out += fmt::format("\n{:<8} {:>11} {:>11} {:>11} {:>11}   (ms)\n", "", "mean", "p50", "p90", "p99");
    for (const auto& [name, d] : {std::pair{"TTFT", metrics.ttft}, std::pair{"TPOT", metrics.tpot},
                                  std::pair{"ITL", metrics.itl}, std::pair{"E2EL", metrics.e2el}}) {
        out +=
            fmt::format("{:<8} {:>11.2f} {:>11.2f} {:>11.2f} {:>11.2f}\n", name, d.mean, d.p50, d.p90, d.p99);
    }
    return out;
}

void add_details(json::Value& object, const LoadOutcome& outcome) {
    json::Value inputs = json::Value::array(), outputs = json::Value::array(), ttfts = json::Value::array(),
                itls = json::Value::array(), errors = json::Value::array();
    for (const LoadResult& result : outcome.results) {
        inputs.push_back(result.prompt_tokens);
        outputs.push_back(result.output_tokens);
        ttfts.push_back(result.error.empty() ? seconds(result.first - result.sent) : 0.0);
        json::Value gaps = json::Value::array();
        for (const TimeNs gap : result.gaps) {
            gaps.push_back(seconds(gap));
        }
        itls.push_back(std::move(gaps));
        errors.push_back(result.error);
    }
    object.set("input_lens", std::move(inputs));
    object.set("output_lens", std::move(outputs));
    object.set("ttfts", std::move(ttfts));
    object.set("itls", std::move(itls));
    object.set("errors", std::move(errors));
}

}  // namespace tessera

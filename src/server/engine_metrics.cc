#include "server/engine_metrics.h"

#include <limits>
#include <string>
#include <utility>

#include "engine/engine.h"
#include "types/page_format.h"

namespace tessera {
namespace {

using prometheus::ClientMetric;
using prometheus::MetricFamily;
using prometheus::MetricType;
using Labels = std::vector<ClientMetric::Label>;

class Writer {
  public:
    Writer(std::vector<MetricFamily>& families, const MetricsConfig& config)
        : families_(families), common_{{"engine", "0"}, {"model_name", config.model_name}} {}

    void family(const char* name, const char* help, MetricType type) {
        families_.push_back({name, help, type, {}});
    }
    ClientMetric& sample(const Labels& labels) {
        ClientMetric& metric = families_.back().metric.emplace_back();
        metric.label = common_;
        metric.label.insert(metric.label.end(), labels.begin(), labels.end());
        return metric;
    }
    void gauge(const char* name, const char* help, double value) {
        family(name, help, MetricType::Gauge);
        sample({}).gauge.value = value;
    }
    void counter(const char* name, const char* help, double value) {
        family(name, help, MetricType::Counter);
        sample({}).counter.value = value;
    }

  private:
    std::vector<MetricFamily>& families_;
    const Labels common_;
};

// The cumulative form that Prometheus wants; the engine's last bucket also holds what is above it.
void fill(ClientMetric::Histogram& out, const StageHistogram& stage) {
    out.sample_count = stage.count;
    out.sample_sum = stage.sum_s;
    uint64_t below = 0;
    for (int i = 0; i + 1 < StageHistogram::kBuckets; ++i) {
        below += stage.bucket[i];
        out.bucket.push_back({below, static_cast<double>(uint64_t{1} << (i + 1)) * 1e-6});
    }
    out.bucket.push_back({stage.count, std::numeric_limits<double>::infinity()});
}

void fill(ClientMetric::Histogram& out, const TokenHistogram& tokens) {
    out.sample_count = tokens.count;
    out.sample_sum = static_cast<double>(tokens.sum);
    uint64_t below = 0;
    for (size_t i = 0; i < std::size(TokenHistogram::kBounds); ++i) {
        below += tokens.bucket[i];
        out.bucket.push_back({below, static_cast<double>(TokenHistogram::kBounds[i])});
    }
    out.bucket.push_back({tokens.count, std::numeric_limits<double>::infinity()});
}

void append_queues(Writer& out, const EngineStats& stats) {
    out.gauge("vllm:num_requests_running", "Requests that hold a slot.", stats.scheduler.running);
    out.gauge("vllm:num_requests_waiting", "Requests that wait for a slot.", stats.scheduler.waiting);
    out.family("vllm:num_requests_waiting_by_reason", "Requests that wait, by why.", MetricType::Gauge);
    out.sample({{"reason", "capacity"}}).gauge.value = stats.scheduler.waiting;
    out.sample({{"reason", "deferred"}}).gauge.value = 0;
    out.gauge("vllm:num_requests_swapped", "Always 0: nothing is swapped out.", 0);
    out.gauge("tessera:waiting_tokens", "Prompt tokens of the requests that wait.",
              static_cast<double>(stats.scheduler.waiting_tokens));
    out.counter("vllm:num_preemptions_total",
                "Requests that lost their pages to others and were computed again.",
                static_cast<double>(stats.scheduler.preemptions));
}

void append_cache(Writer& out, const MetricsConfig& config, const EngineStats& stats) {
    const CacheStats& cache = stats.cache;
    const double usage =
        cache.pages_total > 0 ? static_cast<double>(cache.pages_referenced) / cache.pages_total : 0;
    out.gauge("vllm:kv_cache_usage_perc", "Share of the KV pages that requests hold, 0 to 1.", usage);
    out.gauge("vllm:gpu_cache_usage_perc", "Old name of vllm:kv_cache_usage_perc.", usage);
    out.gauge("vllm:cpu_cache_usage_perc", "Always 0: there is no swap space.", 0);
    out.family("tessera:kv_pages", "KV pages by state.", MetricType::Gauge);
    out.sample({{"state", "free"}}).gauge.value = cache.pages_free;
    out.sample({{"state", "cached"}}).gauge.value = cache.pages_cached;
    out.sample({{"state", "referenced"}}).gauge.value = cache.pages_referenced;
    for (const char* name : {"vllm:prefix_cache_queries_total", "vllm:gpu_prefix_cache_queries_total"}) {
        out.counter(name, "Prompt tokens looked up in the prefix cache.",
                    static_cast<double>(cache.queried_tokens));
    }
    for (const char* name : {"vllm:prefix_cache_hits_total", "vllm:gpu_prefix_cache_hits_total"}) {
        out.counter(name, "Prompt tokens found in the prefix cache.", static_cast<double>(cache.hit_tokens));
    }
    out.counter("tessera:evicted_pages_total", "Cached KV pages given to other requests.",
                static_cast<double>(cache.evicted_pages));
    out.family("vllm:cache_config_info", "Always 1; its labels describe the KV cache.", MetricType::Gauge);
    out.sample({{"block_size", std::to_string(kPageTokens)},
                {"cache_dtype", config.kv_cache_dtype},
                {"enable_prefix_caching", config.prefix_caching ? "True" : "False"},
                {"num_gpu_blocks", std::to_string(config.num_pages)}})
        .gauge.value = 1;
}

void append_steps(Writer& out, const EngineStats& stats) {
    out.family("vllm:iteration_tokens_total", "Tokens computed in a step, prompts and decodes together.",
               MetricType::Histogram);
    fill(out.sample({}).histogram, stats.step_tokens);
    out.family("tessera:stage_seconds", "Time of each stage of the engine's step loop.",
               MetricType::Histogram);
    const std::pair<const char*, const StageHistogram*> stages[] = {
        {"plan", &stats.plan},     {"launch", &stats.launch},   {"collect", &stats.collect},
        {"commit", &stats.commit}, {"deliver", &stats.deliver}, {"step", &stats.step}};
    for (const auto& [name, stage] : stages) {
        fill(out.sample({{"stage", name}}).histogram, *stage);
    }
}

}  // namespace

void append_engine_metrics(std::vector<MetricFamily>& families, const MetricsConfig& config,
                           const EngineStats& stats) {
    Writer out(families, config);
    append_queues(out, stats);
    append_cache(out, config, stats);
    append_steps(out, stats);
}

}  // namespace tessera

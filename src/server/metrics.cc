#include "server/metrics.h"

#include <algorithm>
#include <map>
#include <mutex>
#include <prometheus/counter.h>
#include <prometheus/histogram.h>
#include <prometheus/registry.h>
#include <prometheus/text_serializer.h>
#include <sstream>
#include <utility>
#include <vector>

#include "base/json.h"
#include "engine/engine.h"
#include "server/engine_metrics.h"
#include "server/recent_window.h"
#include "types/page_format.h"

namespace tessera {
namespace {

using Buckets = prometheus::Histogram::BucketBoundaries;

// vLLM's bucket lists, so that dashboards and comparisons made for it fit.
const Buckets kTtftBuckets = {.001, .005, .01, .02, .04, .06, .08, .1, .25, .5,  .75,
                              1,    2.5,  5,   7.5, 10,  20,  40,  80, 160, 640, 2560};
const Buckets kTokenGapBuckets = {.01, .025, .05, .075, .1,  .15, .2, .3, .4, .5,
                                  .75, 1,    2.5, 5,    7.5, 10,  20, 40, 80};
const Buckets kLatencyBuckets = {.3, .5, .8, 1,  1.5, 2,   2.5, 5,   10,   15,  20,
                                 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680};
const Buckets kParamsNBuckets = {1, 2, 5, 10, 20};

// 1, 2, 5, 10, ... up to the longest a request can be.
Buckets token_buckets(int32_t max_model_len) {
    Buckets buckets;
    for (double decade = 1; decade <= max_model_len; decade *= 10) {
        for (const double step : {1.0, 2.0, 5.0}) {
            if (decade * step <= max_model_len) {
                buckets.push_back(decade * step);
            }
        }
    }
    return buckets;
}

// Reasons in the label finished_reason; kNone never finishes.
constexpr FinishReason kReasons[] = {FinishReason::kStop, FinishReason::kLength, FinishReason::kAbort,
                                     FinishReason::kDeadline, FinishReason::kError};

double round_to_micro(double s) {
    return static_cast<double>(static_cast<int64_t>(s * 1e6 + 0.5)) / 1e6;
}

}  // namespace

struct ServerMetrics::Impl {
    explicit Impl(MetricsConfig config_in)
        : config(std::move(config_in)),
          labels{{"model_name", config.model_name}, {"engine", "0"}},
          ttft(histogram("vllm:time_to_first_token_seconds", "From the request's arrival to its first token.",
                         kTtftBuckets)),
          inter_token(histogram("vllm:inter_token_latency_seconds",
                                "Each gap between two events that carry tokens, once.", kTokenGapBuckets)),
          inter_token_old_name(histogram("vllm:time_per_output_token_seconds",
                                         "Old name of vllm:inter_token_latency_seconds.", kTokenGapBuckets)),
          time_per_output_token(
              histogram("vllm:request_time_per_output_token_seconds",
                        "(Latency - time to first token) / (tokens - 1), once a request with two "
                        "tokens or more.",
                        kTokenGapBuckets)),
          e2e(histogram("vllm:e2e_request_latency_seconds", "From the request's arrival to its end.",
                        kLatencyBuckets)),
          queue(histogram("vllm:request_queue_time_seconds", "From the request's arrival to its first slot.",
                          kLatencyBuckets)),
          prefill(histogram("vllm:request_prefill_time_seconds", "From the first slot to the first token.",
                            kLatencyBuckets)),
          inference(histogram("vllm:request_inference_time_seconds", "From the first slot to the last token.",
                              kLatencyBuckets)),
          decode(histogram("vllm:request_decode_time_seconds", "From the first token to the last.",
                           kLatencyBuckets)),
          prompt_size(tokens("vllm:request_prompt_tokens", "Prompt tokens of a request.")),
          generated_size(tokens("vllm:request_generation_tokens", "Output tokens of a request.")),
          longest_choice(tokens("vllm:request_max_num_generation_tokens",
                                "Output tokens of the longest choice of a request.")),
          params_max_tokens(tokens("vllm:request_params_max_tokens", "max_tokens of a request.")),
          computed_size(tokens("vllm:request_prefill_kv_computed_tokens",
                               "Prompt tokens of a request that no cache held.")),
          params_n(histogram("vllm:request_params_n", "n of a request.", kParamsNBuckets)),
          prompt_tokens(counter("vllm:prompt_tokens_total",
                                "Prompt tokens, counted when the first output token comes.")),
          generation_tokens(counter("vllm:generation_tokens_total", "Output tokens, as usage counts them.")),
          cached_tokens(
              counter("vllm:prompt_tokens_cached_total", "Prompt tokens taken from the prefix cache.")) {
        auto& by_source =
            counters("vllm:prompt_tokens_by_source_total", "Prompt tokens by where their KV came from.");
        computed_source = &by_source.Add({{"source", "local_compute"}});
        cached_source = &by_source.Add({{"source", "local_cache_hit"}});
        auto& success = counters("vllm:request_success_total", "Requests that ended, by why.");
        for (const FinishReason reason : kReasons) {
            finished[reason] = &success.Add({{"finished_reason", std::string(finish_reason_name(reason))}});
        }
        rejected = &counters("tessera:requests_rejected_total",
                             "Generation requests answered with an HTTP error, by status.");
    }

    prometheus::Histogram& histogram(const char* name, const char* help, const Buckets& buckets) {
        return prometheus::BuildHistogram().Name(name).Help(help).Labels(labels).Register(registry).Add(
            {}, buckets);
    }
    prometheus::Histogram& tokens(const char* name, const char* help) {
        return histogram(name, help, token_buckets(config.max_model_len));
    }
    prometheus::Family<prometheus::Counter>& counters(const char* name, const char* help) {
        return prometheus::BuildCounter().Name(name).Help(help).Labels(labels).Register(registry);
    }
    prometheus::Counter& counter(const char* name, const char* help) { return counters(name, help).Add({}); }

    const MetricsConfig config;
    const std::map<std::string, std::string> labels;
    prometheus::Registry registry;
    prometheus::Histogram &ttft, &inter_token, &inter_token_old_name, &time_per_output_token, &e2e;
    prometheus::Histogram &queue, &prefill, &inference, &decode;
    prometheus::Histogram &prompt_size, &generated_size, &longest_choice, &params_max_tokens, &computed_size,
        &params_n;
    prometheus::Counter &prompt_tokens, &generation_tokens, &cached_tokens;
    prometheus::Counter* computed_source = nullptr;
    prometheus::Counter* cached_source = nullptr;
    std::map<FinishReason, prometheus::Counter*> finished;
    prometheus::Family<prometheus::Counter>* rejected = nullptr;

    mutable std::mutex recent_mutex;
    RecentRate recent_tokens;
    RecentDurations recent_ttft, recent_tpot;
};

RequestMeter::RequestMeter(ServerMetrics& metrics, TimeNs received, int32_t max_tokens)
    : metrics_(&metrics), received_(received), max_tokens_(max_tokens) {}

RequestMeter::~RequestMeter() {
    if (metrics_ != nullptr) {
        finish(FinishReason::kAbort, now_ns());
    }
}

RequestMeter::RequestMeter(RequestMeter&& other) noexcept {
    *this = std::move(other);
}

RequestMeter& RequestMeter::operator=(RequestMeter&& other) noexcept {
    if (this != &other) {
        if (metrics_ != nullptr) {
            finish(FinishReason::kAbort, now_ns());
        }
        metrics_ = std::exchange(other.metrics_, nullptr);
        received_ = other.received_;
        scheduled_ = other.scheduled_;
        first_token_ = other.first_token_;
        last_token_ = other.last_token_;
        max_tokens_ = other.max_tokens_;
        prompt_tokens_ = other.prompt_tokens_;
        cached_tokens_ = other.cached_tokens_;
        generated_tokens_ = other.generated_tokens_;
    }
    return *this;
}

void RequestMeter::drop() {
    metrics_ = nullptr;
}

void RequestMeter::on_event(const TokenEvent& event, int32_t counted_tokens) {
    if (metrics_ == nullptr) {
        return;
    }
    ServerMetrics::Impl& m = *metrics_->impl_;
    const TimeNs now = event.time != 0 ? event.time : now_ns();
    const bool answered = event.finish == FinishReason::kStop || event.finish == FinishReason::kLength;
    if (first_token_ == 0 && (counted_tokens > 0 || answered)) {
        first_token_ = now;
        prompt_tokens_ = event.prompt_tokens;
        cached_tokens_ = event.cached_tokens;
        scheduled_ = event.scheduled != 0 ? event.scheduled : received_;
        m.queue.Observe(seconds(scheduled_ - received_));
        m.prefill.Observe(seconds(now - scheduled_));
        m.ttft.Observe(seconds(now - received_));
        m.prompt_tokens.Increment(prompt_tokens_);
        m.cached_tokens.Increment(cached_tokens_);
        m.cached_source->Increment(cached_tokens_);
        m.computed_source->Increment(prompt_tokens_ - cached_tokens_);
        std::lock_guard lock(m.recent_mutex);
        m.recent_ttft.add(seconds(now - received_), now);
    } else if (counted_tokens > 0) {
        const double gap = seconds(now - last_token_);
        m.inter_token.Observe(gap);
        m.inter_token_old_name.Observe(gap);
        std::lock_guard lock(m.recent_mutex);
        m.recent_tpot.add(gap / counted_tokens, now);
    }
    if (counted_tokens > 0) {
        last_token_ = now;
        generated_tokens_ += counted_tokens;
        m.generation_tokens.Increment(counted_tokens);
        std::lock_guard lock(m.recent_mutex);
        m.recent_tokens.add(counted_tokens, now);
    }
    if (event.finish != FinishReason::kNone) {
        finish(event.finish, now);
    }
}

void RequestMeter::finish(FinishReason reason, TimeNs now) {
    ServerMetrics::Impl& m = *std::exchange(metrics_, nullptr)->impl_;
    m.finished.at(reason)->Increment();
    m.e2e.Observe(seconds(now - received_));
    m.generated_size.Observe(generated_tokens_);
    m.params_max_tokens.Observe(max_tokens_);
    if (first_token_ == 0) {
        return;  // it ended before its prompt was computed
    }
    m.prompt_size.Observe(prompt_tokens_);
    m.computed_size.Observe(prompt_tokens_ - cached_tokens_);
    m.decode.Observe(seconds(std::max(last_token_, first_token_) - first_token_));
    m.inference.Observe(seconds(std::max(last_token_, first_token_) - scheduled_));
    if (generated_tokens_ > 1) {
        m.time_per_output_token.Observe(seconds(last_token_ - first_token_) / (generated_tokens_ - 1));
    }
}

ServerMetrics::ServerMetrics(MetricsConfig config) : impl_(std::make_unique<Impl>(std::move(config))) {}
ServerMetrics::~ServerMetrics() = default;

void ServerMetrics::client_request_finished(int32_t n, int32_t generated_tokens_max) {
    impl_->params_n.Observe(n);
    impl_->longest_choice.Observe(generated_tokens_max);
}

void ServerMetrics::client_request_rejected(int http_status) {
    impl_->rejected->Add({{"code", std::to_string(http_status)}}).Increment();
}

std::string ServerMetrics::prometheus_text(const EngineStats& stats) const {
    std::vector<prometheus::MetricFamily> families = impl_->registry.Collect();
    append_engine_metrics(families, impl_->config, stats);
    std::ostringstream out;
    prometheus::TextSerializer().Serialize(out, families);
    return std::move(out).str();
}

std::string ServerMetrics::stats_json(const EngineStats& stats, TimeNs now) const {
    json::Value out = json::Value::object();
    out.set("model", impl_->config.model_name);
    out.set("running", int64_t{stats.scheduler.running});
    out.set("waiting", int64_t{stats.scheduler.waiting});
    const auto ratio = [](int64_t part, int64_t whole) {
        return whole > 0 ? json::Value(static_cast<double>(part) / static_cast<double>(whole))
                         : json::Value(nullptr);
    };
    {
        const Impl& m = *impl_;
        std::lock_guard lock(m.recent_mutex);
        out.set("tokens_per_s", m.recent_tokens.per_second(now));
        const auto quantiles = [&](const char* p50, const char* p90, const RecentDurations& durations) {
            const bool any = durations.count(now) > 0;
            out.set(p50,
                    any ? json::Value(round_to_micro(durations.quantile(0.5, now))) : json::Value(nullptr));
            out.set(p90,
                    any ? json::Value(round_to_micro(durations.quantile(0.9, now))) : json::Value(nullptr));
        };
        quantiles("ttft_s", "ttft_p90_s", m.recent_ttft);
        quantiles("tpot_s", "tpot_p90_s", m.recent_tpot);
    }
    out.set("cache_usage", ratio(stats.cache.pages_referenced, stats.cache.pages_total));
    out.set("cache_hit_rate", ratio(stats.cache.hit_tokens, stats.cache.queried_tokens));
    out.set("cached_pages", int64_t{stats.cache.pages_cached});
    out.set("pages", int64_t{stats.cache.pages_total});
    out.set("preemptions", stats.scheduler.preemptions);
    return json::dump(out);
}

}  // namespace tessera

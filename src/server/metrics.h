// ServerMetrics: what /metrics and /stats tell. Each measure is defined here and nowhere else; the streams
// forward every engine event and the definitions (what counts, when, once or per gap) are kept in metrics.cc.
#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "base/clock.h"
#include "types/token_event.h"

namespace tessera {

struct EngineStats;
class ServerMetrics;

// Constant facts for the label sets and bucket lists.
struct MetricsConfig {
    std::string model_name;  // label of every series: the first served name
    int32_t max_model_len = 0;
    int32_t num_pages = 0;
    std::string kv_cache_dtype = "float32";
    bool prefix_caching = true;
};

// The life of one engine request (one choice of one prompt), as its stream sees it. Not thread-safe: one
// event at a time, in order. A meter that is destroyed without its finish event counts as an aborted request,
// so that a rejected submit needs no meter: make it after Engine::submit() could no longer fail, or drop()
// it.
class RequestMeter {
  public:
    RequestMeter() = default;
    // received: when the client's HTTP request came in. TTFT and latency are measured from it.
    RequestMeter(ServerMetrics& metrics, TimeNs received, int32_t max_tokens);
    ~RequestMeter();
    RequestMeter(RequestMeter&& other) noexcept;
    RequestMeter& operator=(RequestMeter&& other) noexcept;

    // Call for every event. counted_tokens: how many of event.tokens the usage counts (tokens past a stop
    // string do not).
    void on_event(const TokenEvent& event, int32_t counted_tokens);
    // Forgets the request: it was never admitted.
    void drop();

  private:
    void finish(FinishReason reason, TimeNs now);

    ServerMetrics* metrics_ = nullptr;  // null: nothing to report (any more)
    TimeNs received_ = 0, scheduled_ = 0, first_token_ = 0, last_token_ = 0;
    int32_t max_tokens_ = 0, prompt_tokens_ = 0, cached_tokens_ = 0, generated_tokens_ = 0;
};

// Thread-safe.
class ServerMetrics {
  public:
    explicit ServerMetrics(MetricsConfig config);
    ~ServerMetrics();
    ServerMetrics(const ServerMetrics&) = delete;
    ServerMetrics& operator=(const ServerMetrics&) = delete;

    // Once for each client request that was admitted, when all its choices are complete: n, and the longest
    // choice.
    void client_request_finished(int32_t n, int32_t generated_tokens_max);
    // A generation request that got an HTTP error instead of an answer (400, 404, 429, 503, ...).
    void client_request_rejected(int http_status);

    // The Prometheus exposition, text format 0.0.4.
    std::string prometheus_text(const EngineStats& stats) const;
    // The page's live panel: one JSON object.
    std::string stats_json(const EngineStats& stats, TimeNs now) const;

  private:
    friend class RequestMeter;
    struct Impl;
    std::unique_ptr<Impl> impl_;
};

}  // namespace tessera

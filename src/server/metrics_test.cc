#include "server/metrics.h"

#include <cmath>
#include <fmt/format.h>
#include <gtest/gtest.h>
#include <string>
#include <utility>

#include "base/json.h"
#include "engine/engine.h"
#include "engine/stage_histogram.h"
#include "server/recent_window.h"

namespace tessera {
namespace {

constexpr TimeNs kMs = kNsPerMs;

// The value of a series given as it is exposed, without the common labels' order mattering: name and one more
// label.
double series(const ServerMetrics& metrics, const std::string& name, const std::string& label = "",
              const EngineStats& stats = {}) {
    const std::string text = "\n" + metrics.prometheus_text(stats);
    for (size_t at = 0; (at = text.find("\n" + name + "{", at)) != std::string::npos; ++at) {
        const std::string line = text.substr(at + 1, text.find('\n', at + 1) - at - 1);
        if (line.find(label) != std::string::npos && line.find("model_name=\"m\"") != std::string::npos &&
            line.find("engine=\"0\"") != std::string::npos) {
            return std::stod(line.substr(line.rfind(' ') + 1));
        }
    }
    ADD_FAILURE() << "no series " << name << " " << label;
    return -1;
}

TokenEvent event(TimeNs time, int tokens, FinishReason finish = FinishReason::kNone) {
    TokenEvent made;
    made.tokens.resize(static_cast<size_t>(tokens));
    made.time = time;
    made.finish = finish;
    made.prompt_tokens = 100;
    made.cached_tokens = 64;
    made.scheduled = 1010 * kMs;
    return made;
}

class Metrics : public testing::Test {
  protected:
    ServerMetrics metrics_{
        {.model_name = "m", .max_model_len = 2048, .num_pages = 10, .kv_cache_dtype = "bfloat16"}};
};

TEST_F(Metrics, CountersAreExact) {
    for (int i = 0; i < 3; ++i) {
        RequestMeter meter(metrics_, 1000 * kMs, 50);
        meter.on_event(event(1030 * kMs, 1), 1);
        meter.on_event(event(1050 * kMs, 2), 2);
        meter.on_event(event(1060 * kMs, 2, FinishReason::kStop), 1);  // a token past the stop string
        metrics_.client_request_finished(1, 4);
    }
    EXPECT_EQ(series(metrics_, "vllm:prompt_tokens_total"), 300);
    EXPECT_EQ(series(metrics_, "vllm:prompt_tokens_cached_total"), 192);
    EXPECT_EQ(series(metrics_, "vllm:prompt_tokens_by_source_total", "local_compute"), 108);
    EXPECT_EQ(series(metrics_, "vllm:prompt_tokens_by_source_total", "local_cache_hit"), 192);
    EXPECT_EQ(series(metrics_, "vllm:generation_tokens_total"), 12);
    EXPECT_EQ(series(metrics_, "vllm:request_success_total", "\"stop\""), 3);
    EXPECT_EQ(series(metrics_, "vllm:request_success_total", "\"abort\""), 0);
    EXPECT_EQ(series(metrics_, "vllm:time_to_first_token_seconds_count"), 3);
    EXPECT_NEAR(series(metrics_, "vllm:time_to_first_token_seconds_sum"), 0.09, 1e-9);
    EXPECT_EQ(series(metrics_, "vllm:time_to_first_token_seconds_bucket", "le=\"0.02\""), 0);
    EXPECT_EQ(series(metrics_, "vllm:time_to_first_token_seconds_bucket", "le=\"0.04\""), 3);
    EXPECT_EQ(series(metrics_, "vllm:inter_token_latency_seconds_count"), 6);  // each gap once
    EXPECT_NEAR(series(metrics_, "vllm:inter_token_latency_seconds_sum"), 0.09, 1e-9);
    EXPECT_EQ(series(metrics_, "vllm:time_per_output_token_seconds_count"), 6);
    EXPECT_EQ(series(metrics_, "vllm:request_time_per_output_token_seconds_count"), 3);
    EXPECT_NEAR(series(metrics_, "vllm:request_time_per_output_token_seconds_sum"), 0.03, 1e-9);
    EXPECT_NEAR(series(metrics_, "vllm:e2e_request_latency_seconds_sum"), 0.18, 1e-9);
    EXPECT_NEAR(series(metrics_, "vllm:request_decode_time_seconds_sum"), 0.09, 1e-9);
    EXPECT_NEAR(series(metrics_, "vllm:request_queue_time_seconds_sum"), 0.03, 1e-9);
    EXPECT_NEAR(series(metrics_, "vllm:request_prefill_time_seconds_sum"), 0.06, 1e-9);
    EXPECT_NEAR(series(metrics_, "vllm:request_inference_time_seconds_sum"), 0.15, 1e-9);
    EXPECT_EQ(series(metrics_, "vllm:request_prompt_tokens_sum"), 300);
    EXPECT_EQ(series(metrics_, "vllm:request_generation_tokens_sum"), 12);
    EXPECT_EQ(series(metrics_, "vllm:request_prefill_kv_computed_tokens_sum"), 108);
    EXPECT_EQ(series(metrics_, "vllm:request_params_max_tokens_sum"), 150);
    EXPECT_EQ(series(metrics_, "vllm:request_params_n_count"), 3);
    EXPECT_EQ(series(metrics_, "vllm:request_max_num_generation_tokens_sum"), 12);
}

TEST_F(Metrics, EveryAdmittedRequestEndsOnce) {
    {
        RequestMeter waiting(metrics_, 1000 * kMs, 50);  // cancelled before its prompt was computed
        waiting.on_event(event(1500 * kMs, 0, FinishReason::kAbort), 0);
        RequestMeter lost(metrics_, 1000 * kMs, 50);  // let go without a finish event
        RequestMeter moved = std::move(lost);
        RequestMeter never_admitted(metrics_, 1000 * kMs, 50);
        never_admitted.drop();
        RequestMeter only_eos(metrics_, 1000 * kMs, 50);  // an answer without a token that counts
        only_eos.on_event(event(1020 * kMs, 0, FinishReason::kStop), 0);
        RequestMeter failed(metrics_, 1000 * kMs, 50);
        failed.on_event(event(1020 * kMs, 1), 1);
        failed.on_event(event(1030 * kMs, 0, FinishReason::kError), 0);
        failed.on_event(event(1040 * kMs, 1), 1);  // nothing counts after the end
    }
    EXPECT_EQ(series(metrics_, "vllm:request_success_total", "\"abort\""), 2);
    EXPECT_EQ(series(metrics_, "vllm:request_success_total", "\"stop\""), 1);
    EXPECT_EQ(series(metrics_, "vllm:request_success_total", "\"error\""), 1);
    EXPECT_EQ(series(metrics_, "vllm:e2e_request_latency_seconds_count"), 4);
    EXPECT_EQ(series(metrics_, "vllm:time_to_first_token_seconds_count"), 2);
    EXPECT_EQ(series(metrics_, "vllm:prompt_tokens_total"), 200);
    EXPECT_EQ(series(metrics_, "vllm:generation_tokens_total"), 1);
    EXPECT_EQ(series(metrics_, "vllm:request_time_per_output_token_seconds_count"), 0);
}

TEST_F(Metrics, Rejections) {
    metrics_.client_request_rejected(429);
    metrics_.client_request_rejected(429);
    metrics_.client_request_rejected(400);
    EXPECT_EQ(series(metrics_, "tessera:requests_rejected_total", "\"429\""), 2);
    EXPECT_EQ(series(metrics_, "tessera:requests_rejected_total", "\"400\""), 1);
}

TEST_F(Metrics, EngineFigures) {
    EngineStats stats;
    stats.scheduler.running = 3;
    stats.scheduler.waiting = 2;
    stats.scheduler.preemptions = 7;
    stats.scheduler.prompt_tokens = 100;
    stats.scheduler.cached_tokens = 64;
    stats.scheduler.generated_tokens = 20;
    record(stats.step_tokens, 1);
    record(stats.step_tokens, 8);
    record(stats.step_tokens, 9);
    record(stats.step_tokens, 20000);
    stats.cache = {.pages_total = 10,
                   .pages_free = 5,
                   .pages_cached = 1,
                   .pages_referenced = 4,
                   .queried_tokens = 200,
                   .hit_tokens = 128};
    stats.plan.count = 3;
    stats.plan.sum_s = 0.5;
    stats.plan.bucket[0] = 1;
    stats.plan.bucket[10] = 2;  // 1024 to 2048 us
    EXPECT_EQ(series(metrics_, "vllm:num_requests_running", "", stats), 3);
    EXPECT_EQ(series(metrics_, "vllm:num_requests_waiting", "", stats), 2);
    EXPECT_EQ(series(metrics_, "vllm:num_requests_waiting_by_reason", "capacity", stats), 2);
    EXPECT_EQ(series(metrics_, "vllm:num_preemptions_total", "", stats), 7);
    EXPECT_DOUBLE_EQ(series(metrics_, "vllm:kv_cache_usage_perc", "", stats), 0.4);
    EXPECT_DOUBLE_EQ(series(metrics_, "vllm:gpu_cache_usage_perc", "", stats), 0.4);
    EXPECT_EQ(series(metrics_, "vllm:prefix_cache_queries_total", "", stats), 200);
    EXPECT_EQ(series(metrics_, "vllm:gpu_prefix_cache_hits_total", "", stats), 128);
    EXPECT_EQ(series(metrics_, "vllm:cache_config_info", "cache_dtype=\"bfloat16\"", stats), 1);
    EXPECT_EQ(series(metrics_, "vllm:cache_config_info", "num_gpu_blocks=\"10\"", stats), 1);
    EXPECT_EQ(series(metrics_, "vllm:iteration_tokens_total_count", "", stats), 4);
    EXPECT_EQ(series(metrics_, "vllm:iteration_tokens_total_sum", "", stats), 20018);
    for (const auto& [bound, below] : {std::pair{"1", 1}, {"8", 2}, {"16", 3}, {"16384", 3}, {"+Inf", 4}}) {
        EXPECT_EQ(
            series(metrics_, "vllm:iteration_tokens_total_bucket", fmt::format("le=\"{}\"", bound), stats),
            below);
    }
    EXPECT_EQ(series(metrics_, "tessera:stage_seconds_count", "stage=\"plan\"", stats), 3);
    EXPECT_DOUBLE_EQ(series(metrics_, "tessera:stage_seconds_sum", "stage=\"plan\"", stats), 0.5);
    const std::string text = metrics_.prometheus_text(stats);
    EXPECT_NE(text.find("# TYPE vllm:num_requests_running gauge"), std::string::npos);
    EXPECT_NE(text.find("# TYPE vllm:prefix_cache_queries_total counter"), std::string::npos);
}

TEST_F(Metrics, LivePanel) {
    const TimeNs start = 1'000 * kNsPerSecond;
    const json::Value empty = json::parse(metrics_.stats_json({}, start)).take();
    EXPECT_EQ(empty.find("running")->as_int64(), 0);
    EXPECT_EQ(empty.find("tokens_per_s")->as_double(), 0);
    EXPECT_TRUE(empty.find("ttft_s")->is_null());
    EXPECT_TRUE(empty.find("cache_usage")->is_null());

    RequestMeter meter(metrics_, start, 1000);
    for (int i = 1; i <= 400; ++i) {  // 100 tokens a second for four seconds
        meter.on_event(event(start + i * 10 * kMs, 1), 1);
    }
    EngineStats stats;
    stats.cache = {.pages_total = 10, .pages_referenced = 5, .queried_tokens = 100, .hit_tokens = 25};
    const json::Value live = json::parse(metrics_.stats_json(stats, start + 4'000 * kMs)).take();
    EXPECT_NEAR(live.find("tokens_per_s")->as_double(), 100, 1);
    EXPECT_NEAR(live.find("ttft_s")->as_double(), 0.01, 0.001);
    EXPECT_NEAR(live.find("tpot_s")->as_double(), 0.01, 0.001);
    EXPECT_EQ(live.find("cache_usage")->as_double(), 0.5);
    EXPECT_EQ(live.find("cache_hit_rate")->as_double(), 0.25);
    const json::Value later = json::parse(metrics_.stats_json(stats, start + 70'000 * kMs)).take();
    EXPECT_EQ(later.find("tokens_per_s")->as_double(), 0);
    EXPECT_TRUE(later.find("tpot_s")->is_null());
}

TEST(RecentDurations, QuantilesWithinABucket) {
    RecentDurations durations;
    for (int i = 1; i <= 1000; ++i) {
        durations.add(i * 1e-3, 5 * kNsPerSecond + i * kMs);
    }
    const TimeNs now = 7 * kNsPerSecond;
    EXPECT_EQ(durations.count(now), 1000);
    for (const double q : {0.01, 0.5, 0.9, 0.99}) {
        EXPECT_NEAR(std::log2(durations.quantile(q, now) / q), 0, 0.13) << q;
    }
    durations.add(1e9, now);  // beyond the last bucket
    durations.add(-1, now);
    EXPECT_EQ(durations.count(now), 1002);
    EXPECT_EQ(durations.count(now + 61 * kNsPerSecond), 0);
    EXPECT_EQ(durations.quantile(0.5, now + 61 * kNsPerSecond), 0);
}

}  // namespace
}  // namespace tessera

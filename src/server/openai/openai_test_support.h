// For this layer's tests: an exchange that records its answer, a runner that plays scripts, and the
// server-sent events' contract as a checker. Included by *_test.cc only.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <gtest/gtest.h>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "base/json.h"
#include "engine/engine.h"
#include "server/openai_service.h"

namespace tessera {

inline const Tokenizer& demo_tokenizer() {
    static const std::unique_ptr<Tokenizer> kTokenizer = [] {
        auto loaded = Tokenizer::load(TESSERA_SOURCE_DIR "/models/demo");
        check(loaded.ok(), "the demonstration model's tokenizer must load");
        return loaded.take();
    }();
    return *kTokenizer;
}

inline constexpr TokenId kDemoEos = 4006;
inline constexpr int32_t kDemoVocab = 4096;

inline std::vector<TokenId> demo_ids(std::string_view text) {
    return demo_tokenizer().encode(text).take();
}

// Records what a handler answers. The client can be made to go away, or to stop reading.
class RecordingExchange final : public HttpExchange {
  public:
    explicit RecordingExchange(HttpRequest request) : request_(std::move(request)) {}

    const HttpRequest& request() const override { return request_; }

    void respond(int status, std::string content_type, std::string body, HttpHeaders headers) override {
        std::lock_guard lock(mutex_);
        EXPECT_FALSE(answered_ || started_) << "two answers";
        answered_ = true;
        status_ = status;
        content_type_ = std::move(content_type);
        body_ = std::move(body);
        headers_ = std::move(headers);
        changed_.notify_all();
    }
    void start_stream(int status, std::string content_type, HttpHeaders headers) override {
        std::lock_guard lock(mutex_);
        EXPECT_FALSE(answered_ || started_) << "two answers";
        started_ = true;
        status_ = status;
        content_type_ = std::move(content_type);
        headers_ = std::move(headers);
    }
    bool write(std::string piece) override {
        std::lock_guard lock(mutex_);
        EXPECT_TRUE(started_ && !answered_) << "a write outside a stream";
        body_ += piece;
        ++writes_;
        changed_.notify_all();
        return !cut_;
    }
    void end() override {
        std::lock_guard lock(mutex_);
        EXPECT_TRUE(started_ && !answered_) << "an end outside a stream";
        answered_ = true;
        changed_.notify_all();
    }
    void on_disconnect(std::function<void()> callback) override {
        std::lock_guard lock(mutex_);
        on_disconnect_ = std::move(callback);
    }
    void after(std::chrono::milliseconds, std::function<void()> task) override {
        std::lock_guard lock(mutex_);
        timers_.push_back(std::move(task));
    }

    // Waits for the answer's end.
    void wait() {
        std::unique_lock lock(mutex_);
        ASSERT_TRUE(changed_.wait_for(lock, std::chrono::seconds(60), [&] { return answered_; })) << body_;
    }
    // Waits until the body holds `text`.
    void wait_for_text(std::string_view text) {
        std::unique_lock lock(mutex_);
        ASSERT_TRUE(changed_.wait_for(lock, std::chrono::seconds(60),
                                      [&] { return body_.find(text) != std::string::npos; }));
    }
    void fire_timers() {
        std::vector<std::function<void()>> tasks;
        {
            std::lock_guard lock(mutex_);
            tasks.swap(timers_);
        }
        for (const auto& task : tasks) {
            task();
        }
    }
    void disconnect() {
        std::function<void()> callback;
        {
            std::lock_guard lock(mutex_);
            callback = std::exchange(on_disconnect_, nullptr);
        }
        ASSERT_TRUE(callback);
        callback();
    }
    void stop_reading() {
        std::lock_guard lock(mutex_);
        cut_ = true;
    }
    bool answered() {
        std::lock_guard lock(mutex_);
        return answered_;
    }
    int status() {
        std::lock_guard lock(mutex_);
        return status_;
    }
    std::string body() {
        std::lock_guard lock(mutex_);
        return body_;
    }
    HttpHeaders headers() {
        std::lock_guard lock(mutex_);
        return headers_;
    }
    json::Value json() {
        auto parsed = json::parse(body());
        EXPECT_TRUE(parsed.ok()) << body();
        return parsed.ok() ? parsed.take() : json::Value();
    }

  private:
    const HttpRequest request_;
    std::mutex mutex_;
    std::condition_variable changed_;
    bool answered_ = false, started_ = false, cut_ = false;
    int status_ = 0, writes_ = 0;
    std::string content_type_, body_;
    HttpHeaders headers_;
    std::function<void()> on_disconnect_;
    std::vector<std::function<void()>> timers_;
};

// What the scripted model answers to one sequence. After the tokens comes EOS.
struct Script {
    std::vector<TokenId> tokens;
    std::string error_at_end;  // not empty: the row fails there instead
    bool endless = false;      // the tokens repeat
};

// Plays Script(sequence) for each slot; forced tokens are the test's business. Log-probabilities are made up
// but repeatable.
class ScriptedModel final : public Runner {
  public:
    using Play = std::function<Script(const SlotInit&)>;
    explicit ScriptedModel(Play play, std::chrono::microseconds step_time = {})
        : play_(std::move(play)), step_time_(step_time) {}

    void launch(StepPlan plan) override {
        for (const SlotInit& init : plan.inits) {
            slots_[init.slot] = {play_(init), init.sampling, init.output.size()};
        }
        plans_.push_back(std::move(plan));
    }
    StepResult collect() override {
        std::this_thread::sleep_for(step_time_);
        const StepPlan plan = std::move(plans_.front());
        plans_.pop_front();
        StepResult result{.step = plan.step, .started = now_ns(), .finished = now_ns()};
        for (const StepRow& row : plan.rows) {
            RowResult one{.slot = row.slot, .generation = row.generation};
            if (row.kind != RowKind::kPrefill) {
                sample(slots_[row.slot], one);
            }
            result.rows.push_back(std::move(one));
        }
        return result;
    }
    int max_in_flight() const override { return 2; }

  private:
    struct Slot {
        Script script;
        SamplingParams sampling;
        size_t next = 0;
    };

    static void sample(Slot& slot, RowResult& out) {
        const std::vector<TokenId>& tokens = slot.script.tokens;
        const bool over = !slot.script.endless && slot.next >= tokens.size();
        if (over && !slot.script.error_at_end.empty()) {
            out.error = slot.script.error_at_end;
            return;
        }
        GeneratedToken token;
        token.token = over || tokens.empty() ? kDemoEos : tokens[slot.next % tokens.size()];
        ++slot.next;
        if (slot.sampling.logprobs) {
            token.logprob = -0.25F * static_cast<float>(slot.next);
            for (int32_t i = 0; i < *slot.sampling.logprobs; ++i) {
                const float logprob = i == 1 ? -std::numeric_limits<float>::infinity() : -1.0F;
                token.top.push_back({(token.token + i) % kDemoVocab, logprob});
            }
        }
        out.tokens.push_back(std::move(token));
    }

    const Play play_;
    const std::chrono::microseconds step_time_;
    std::deque<StepPlan> plans_;
    std::unordered_map<SlotId, Slot> slots_;
};

// An engine over a scripted model and the service on top of it.
class OpenAiFixture {
  public:
    explicit OpenAiFixture(ScriptedModel::Play play, OpenAiConfig config = {},
                           std::chrono::microseconds step_time = {})
        : engine_(engine_config(), std::make_unique<ScriptedModel>(std::move(play), step_time)),
          service_(service_config(std::move(config)), engine_, demo_tokenizer(), nullptr) {
        for (HttpRoute& route : service_.routes()) {
            handlers_[route.method + " " + route.path] = std::move(route.handler);
        }
    }

    Engine& engine() { return engine_; }

    // Sends and returns at once.
    std::shared_ptr<RecordingExchange> send(const std::string& route, std::string body,
                                            std::string tenant = {}, std::string path = {}) {
        HttpRequest request;
        request.body = std::move(body);
        request.path = std::move(path);
        request.request_id = "test";
        request.tenant = std::move(tenant);
        auto exchange = std::make_shared<RecordingExchange>(std::move(request));
        handlers_.at(route)(exchange);
        return exchange;
    }
    // Sends and waits for the end.
    std::shared_ptr<RecordingExchange> ask(const std::string& route, std::string body,
                                           std::string tenant = {}) {
        auto exchange = send(route, std::move(body), std::move(tenant));
        exchange->wait();
        return exchange;
    }
    // Waits until the engine holds no request.
    void wait_idle() {
        for (int i = 0; i < 60'000 && !engine_.idle(); ++i) {
            std::this_thread::sleep_for(std::chrono::milliseconds(1));
        }
        ASSERT_TRUE(engine_.idle());
    }

    static EngineConfig engine_config() {
        EngineConfig config;
        config.num_pages = 256;
        config.scheduler.max_num_seqs = 8;
        config.scheduler.max_num_batched_tokens = 256;
        config.scheduler.max_model_len = 2048;
        config.scheduler.eos_ids = {kDemoEos};
        config.max_queued_requests = 32;
        return config;
    }
    static OpenAiConfig service_config(OpenAiConfig config) {
        config.served_model_names = {"demo", "org/demo"};
        config.model_root = "models/demo";
        config.max_model_len = 2048;
        config.vocab_size = kDemoVocab;
        return config;
    }

  private:
    Engine engine_;
    OpenAiService service_;
    std::map<std::string, HttpHandler> handlers_;
};

// ---------------------------------------------------------------------------------------------------------------
// The contract of a stream

// A choice as a client puts it together.
struct JoinedChoice {
    std::string reasoning, content;
    std::vector<std::pair<std::string, std::string>> calls;  // name, arguments
    std::vector<json::Value> logprobs;
    std::vector<int64_t> token_ids;
    std::string finish_reason;
    std::string stop_reason;  // as JSON
};

struct JoinedStream {
    std::map<int64_t, JoinedChoice> choices;
    json::Value usage;  // of the usage chunk
    json::Value error;
    int pings = 0;
};

// Reads a whole stream and fails the test where it breaks the contract: one id, model and created; per choice
// the role first, then deltas, then one finish chunk with an empty delta; a usage chunk last when asked;
// always [DONE].
JoinedStream read_stream(const std::string& body, bool chat, bool include_usage);

}  // namespace tessera

// Bodies of the API's POST routes: the first byte chooses the route, the rest is the body. Any body gets an
// answer in the API's form: 200 (tokenise, detokenise), a 4xx that says what is wrong, or the 503 of an
// engine that takes no requests, which is what a valid completion reaches here. Never a 500, never a crash.
#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <string_view>

#include "base/check.h"
#include "base/json.h"
#include "engine/engine.h"
#include "server/openai_service.h"

namespace {

using namespace tessera;

class NoRunner final : public Runner {
  public:
    void launch(StepPlan) override { check(false, "nothing is admitted"); }
    StepResult collect() override { return {}; }
    int max_in_flight() const override { return 2; }
};

class OneAnswer final : public HttpExchange {
  public:
    explicit OneAnswer(HttpRequest request) : request_(std::move(request)) {}
    const HttpRequest& request() const override { return request_; }
    void respond(int answer_status, std::string, std::string answer_body, HttpHeaders) override {
        check(status == 0, "one answer");
        status = answer_status;
        body = std::move(answer_body);
    }
    void start_stream(int, std::string, HttpHeaders) override { check(false, "nothing is streamed"); }
    bool write(std::string) override { return false; }
    void end() override {}
    void on_disconnect(std::function<void()>) override {}
    void after(std::chrono::milliseconds, std::function<void()>) override {}

    int status = 0;
    std::string body;

  private:
    const HttpRequest request_;
};

struct Service {
    Service() {
        EngineConfig engine_config;
        engine_config.num_pages = 64;
        engine_config.scheduler.max_model_len = 2048;
        engine_config.scheduler.eos_ids = {4006};
        engine = std::make_unique<Engine>(engine_config, std::make_unique<NoRunner>());
        engine->stop_admission();
        auto loaded = Tokenizer::load(TESSERA_SOURCE_DIR "/models/demo");
        check(loaded.ok(), "the demonstration model's tokenizer must load");
        tokenizer = loaded.take();
        OpenAiConfig config;
        config.served_model_names = {"demo"};
        config.max_model_len = 2048;
        config.vocab_size = 4096;
        for (HttpRoute& route : OpenAiService(config, *engine, *tokenizer, nullptr).routes()) {
            handlers[route.path] = std::move(route.handler);
        }
    }

    std::unique_ptr<Engine> engine;
    std::unique_ptr<Tokenizer> tokenizer;
    std::map<std::string, HttpHandler> handlers;
};

void check_answer(const OneAnswer& answer) {
    const auto body = json::parse(answer.body);
    check(body.ok() && body->is_object(), "the answer is a JSON object");
    if (answer.status == 200) {
        return;
    }
    check((answer.status >= 400 && answer.status < 500) || answer.status == 503,
          "a 4xx or the engine's refusal");
    const json::Value* error = body->find("error");
    check(error != nullptr && error->find("message") != nullptr && error->find("message")->is_string() &&
              !error->find("message")->as_string().empty(),
          "an error says what is wrong");
}

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    static const Service service;
    static constexpr const char* kRoutes[] = {"/v1/chat/completions", "/v1/completions", "/tokenize",
                                              "/detokenize"};
    if (size == 0) {
        return 0;
    }
    HttpRequest request;
    request.path = kRoutes[data[0] % std::size(kRoutes)];
    request.body.assign(reinterpret_cast<const char*>(data) + 1, size - 1);
    const std::string path = request.path;
    const auto answer = std::make_shared<OneAnswer>(std::move(request));
    service.handlers.at(path)(answer);
    check_answer(*answer);
    return 0;
}

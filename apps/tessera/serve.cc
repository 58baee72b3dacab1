// tessera serve: the OpenAI-compatible server over one model.
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <fmt/format.h>
#include <future>
#include <stop_token>
#include <thread>

#include "base/clock.h"
#include "base/log.h"
#include "cli.h"
#include "engine_setup.h"
#include "serve_config.h"
#include "server/server.h"
#include "signals.h"
#include "subcommands.h"

namespace tessera {
namespace {

using std::chrono::milliseconds;

milliseconds to_ms(double s) {
    return milliseconds(static_cast<int64_t>(s * 1e3));
}

bool loopback(const std::string& host) {
    return host == "localhost" || host == "::1" || host.starts_with("127.");
}

// A signal while the model loads ends the process at once: there is nothing to drain.
class ExitOnSignal {
  public:
    explicit ExitOnSignal(const Signals& signals)
        : thread_([&signals](const std::stop_token& stop) {
              while (!stop.stop_requested()) {
                  if (const int signal = signals.wait_for(milliseconds(10)); signal != 0) {
                      std::_Exit(128 + signal);
                  }
              }
          }) {}

  private:
    std::jthread thread_;
};

OpenAiConfig openai_config(const ServeConfig& config, const EngineBundle& bundle) {
    OpenAiConfig openai;
    openai.served_model_names = config.served_model_names;
    openai.model_root = config.engine.model;
    openai.max_model_len = bundle.max_model_len;
    openai.vocab_size = static_cast<int32_t>(bundle.config.vocab_size);
    openai.defaults = config.authors_sampling_defaults ? bundle.generation : GenerationDefaults{};
    openai.default_chat_template_kwargs = config.chat_template_kwargs;
    if (config.seed) {
        openai.seed = static_cast<uint64_t>(*config.seed);
    }
    openai.request_deadline = to_ms(config.request_timeout_s);
    openai.share_cache_between_keys = config.share_cache_between_keys;
    openai.force_include_usage = config.force_include_usage;
    openai.created = static_cast<int64_t>(std::time(nullptr));
    return openai;
}

MetricsConfig metrics_config(const ServeConfig& config, const EngineBundle& bundle) {
    return {.model_name = config.served_model_names.front(),
            .max_model_len = bundle.max_model_len,
            .num_pages = bundle.num_pages,
            .kv_cache_dtype = bundle.kv_cache_dtype,
            .prefix_caching = config.engine.prefix_caching};
}

void announce(const ServeConfig& config, const EngineBundle& bundle, const Server& server, TimeNs started) {
    std::fprintf(stderr,
                 "%s: context %d tokens, weights %.1f MB, KV pool %d pages (%.1f MB, %s), %d threads; ready "
                 "in %.2f s\n",
                 config.served_model_names.front().c_str(), bundle.max_model_len,
                 static_cast<double>(bundle.weight_bytes) * 1e-6, bundle.num_pages,
                 static_cast<double>(bundle.kv_cache_bytes) * 1e-6, bundle.kv_cache_dtype.c_str(),
                 bundle.threads, seconds(now_ns() - started));
    std::printf("Serving on %s\n", server.url().c_str());
    std::fflush(stdout);
}

// Runs the shutdown, unless a second signal ends the process first.
void shut_down(Server& server, const ServeConfig& config, const Signals& signals) {
    std::fprintf(stderr, "stopping: running requests have %.0f s to end; a second signal exits at once\n",
                 config.shutdown_timeout_s);
    const std::future<void> done =
        std::async(std::launch::async, [&] { server.shutdown(to_ms(config.shutdown_timeout_s)); });
    while (done.wait_for(milliseconds(0)) != std::future_status::ready) {
        if (const int signal = signals.wait_for(milliseconds(20)); signal != 0) {
            std::_Exit(128 + signal);
        }
    }
}

}  // namespace

int run_serve(int argc, char** argv) {
    const TimeNs started = now_ns();
    ServeConfig config;
    if (const std::optional<int> status = parse_serve(argc, argv, config)) {
        return *status;
    }
    set_log_level(config.log_level);
    if (config.print_config) {
        std::printf("%s\n", serve_config_json(config).c_str());
        return 0;
    }
    if (!loopback(config.http.host) && config.http.api_keys.empty()) {
        log_warning(fmt::format("anyone who can reach {} may use this server: give --api-key-file",
                                config.http.host));
    }
    const Signals signals;
    std::signal(SIGPIPE, SIG_IGN);
    // The address first: one that is taken is told before a model is loaded. The server is destroyed after
    // the engine.
    Result<std::unique_ptr<Server>> server = Server::bind(config.http);
    if (!server.ok()) {
        return fail(server.status());
    }
    Result<EngineBundle> bundle = [&] {
        const ExitOnSignal watch(signals);
        return make_engine(config.engine);
    }();
    if (!bundle.ok()) {
        return fail(bundle.status());
    }
    (*server)->start({.openai = openai_config(config, *bundle),
                      .metrics = metrics_config(config, *bundle),
                      .engine = *bundle->engine,
                      .tokenizer = *bundle->tokenizer});
    announce(config, *bundle, **server, started);
    signals.wait();
    shut_down(**server, config, signals);
    return 0;
}

}  // namespace tessera

// tessera bench serve: load test of any OpenAI-compatible server, in the manner of `vllm bench serve`.
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <fmt/format.h>
#include <fstream>
#include <limits>
#include <random>
#include <unistd.h>

#include "bench.h"
#include "cli.h"
#include "load_client.h"
#include "load_dataset.h"
#include "load_metrics.h"

namespace tessera {
namespace {

struct Arguments {
    std::string base_url, host = "127.0.0.1", endpoint = "completions", model, api_key;
    int port = 8000;
    size_t num_prompts = 0;
    std::string request_rate = "inf";
    double rate = 0;  // requests/s; 0 = all at once
    double burstiness = 1;
    int64_t max_concurrency = 0;
    std::string dataset = "random";
    RandomSpec random{.input_tokens = 512, .output_tokens = 128};
    FileSpec file;
    IdRange ids{256, 1000};
    std::vector<std::string> goodput_words;
    GoodputLimits goodput;
    std::string save_result;
    double temperature = 0, timeout_s = 3600;
    bool honor_eos = false;
};

void add_server_options(CLI::App& app, Arguments& a) {
    app.add_option("--base-url", a.base_url, "http://HOST:PORT; in place of --host and --port");
    app.add_option("--host", a.host)->capture_default_str();
    app.add_option("--port", a.port)->check(CLI::Range(1, 65535))->capture_default_str();
    app.add_option("--endpoint", a.endpoint, "chat or completions")
        ->check(CLI::IsMember({"chat", "completions"}))
        ->capture_default_str();
    app.add_option("--model", a.model, "the name that requests carry; default: the server's first model");
    app.add_option("--api-key", a.api_key, "default: the environment's OPENAI_API_KEY");
    app.add_option("--request-timeout", a.timeout_s, "seconds")
        ->check(number_range(0.1, 1e6))
        ->capture_default_str();
}

void add_load_options(CLI::App& app, Arguments& a) {
    app.add_option("--num-prompts", a.num_prompts, "default: 100 random prompts, or all of a file")
        ->check(CLI::Range(1, 1'000'000));
    app.add_option("--request-rate", a.request_rate,
                   "arrivals a second; inf = all at once, or a trace's own times")
        ->capture_default_str();
    app.add_option("--burstiness", a.burstiness, "1 = Poisson arrivals; lower = burstier, higher = more even")
        ->check(number_range(1e-3, 1e6))
        ->capture_default_str();
    app.add_option("--max-concurrency", a.max_concurrency,
                   "requests at once; with --request-rate inf a closed loop")
        ->check(CLI::Range(1, 1'000'000));
    app.add_option("--seed", a.random.seed, "of prompts and arrivals")
        ->check(whole_number())
        ->capture_default_str();
    app.add_option("--temperature", a.temperature)->check(number_range(0.0, 2.0))->capture_default_str();
    app.add_flag("--honor-eos", a.honor_eos,
                 "let the model end; else ignore_eos is sent and output lengths are fixed");
}

void add_dataset_options(CLI::App& app, Arguments& a) {
    const CLI::Range tokens(0, 1 << 24);
    app.add_option("--dataset-name", a.dataset, "random, mooncake or custom")
        ->check(CLI::IsMember({"random", "mooncake", "custom"}))
        ->capture_default_str();
    app.add_option("--dataset-path", a.file.path,
                   "mooncake: trace lines; custom: {\"prompt\"} lines; .jsonl or .jsonl.gz");
    app.add_option("--random-input-len", a.random.input_tokens, "tokens")
        ->check(tokens)
        ->capture_default_str();
    app.add_option("--random-output-len", a.random.output_tokens, "tokens")
        ->check(CLI::Range(1, 1 << 24))
        ->capture_default_str();
    app.add_option("--random-prefix-len", a.random.prefix_tokens,
                   "tokens that all prompts share, before the rest")
        ->check(tokens);
    app.add_option("--custom-output-len", a.file.output_tokens, "tokens, where a line has no output_tokens")
        ->check(CLI::Range(1, 1 << 24))
        ->capture_default_str();
    app.add_option("--trace-block-size", a.file.block_tokens, "tokens of one hash id")
        ->check(CLI::Range(1, 1 << 20))
        ->capture_default_str();
    app.add_option("--trace-speedup", a.file.speedup, "divides a trace's times")
        ->check(number_range(1e-3, 1e6))
        ->capture_default_str();
    app.add_option("--token-id-first", a.ids.first, "made prompts use ids from here")
        ->check(tokens)
        ->capture_default_str();
    app.add_option("--token-id-end", a.ids.end, "up to, not including, this; keep special tokens out")
        ->check(tokens)
        ->capture_default_str();
}

void add_result_options(CLI::App& app, Arguments& a) {
    app.add_option("--goodput", a.goodput_words,
                   "limits in ms that a good request meets: ttft:4000 tpot:50 e2el:...");
    app.add_option("--save-result", a.save_result, "file for the JSON result with every request's figures");
    app.footer(
        "TTFT: sending to first output. TPOT: (E2EL - TTFT) / (output tokens - 1). ITL: gaps between "
        "streamed outputs.\n"
        "The table goes to standard error, one JSON object with vLLM's names to standard output. Status 1 "
        "when a\n"
        "request failed. A second run with the same --seed meets a warm prefix cache.\n\n"
        "examples:\n"
        "  tessera bench serve --port 8000 --num-prompts 64 --max-concurrency 16 --random-input-len 512\n"
        "  tessera bench serve --request-rate 4 --goodput ttft:4000 tpot:50 --endpoint chat\n"
        "  tessera bench serve --dataset-name mooncake --dataset-path trace.jsonl.gz --num-prompts 200");
}

// Checks that involve more than one option.
Status finish_arguments(Arguments& a) {
    char* end = nullptr;
    const double rate = std::strtod(a.request_rate.c_str(), &end);
    if (a.request_rate.empty() || *end != '\0' || !(rate > 0)) {
        return invalid_argument("--request-rate must be a positive number or inf");
    }
    a.rate = std::isinf(rate) ? 0 : rate;
    if (a.ids.end <= a.ids.first) {
        return invalid_argument("--token-id-end must be above --token-id-first");
    }
    if (a.dataset != "random" && a.file.path.empty()) {
        return invalid_argument("--dataset-path is required for the dataset " + a.dataset);
    }
    if (a.dataset == "random" && a.random.input_tokens + a.random.prefix_tokens == 0) {
        return invalid_argument("--random-input-len and --random-prefix-len must not both be 0");
    }
    const Result<GoodputLimits> goodput = parse_goodput(a.goodput_words);
    if (!goodput.ok()) {
        return goodput.status();
    }
    a.goodput = *goodput;
    if (a.api_key.empty()) {
        const char* key = std::getenv("OPENAI_API_KEY");
        a.api_key = key == nullptr ? "" : key;
    }
    return {};
}

std::optional<int> parse(int argc, char** argv, Arguments& a) {
    CLI::App app("Sends streamed requests to an OpenAI-compatible server and measures the answers.");
    app.name("tessera bench serve");
    add_server_options(app, a);
    add_load_options(app, a);
    add_dataset_options(app, a);
    add_result_options(app, a);
    if (const std::optional<int> status = parse_arguments(app, argc, argv)) {
        return status;
    }
    if (const Status status = finish_arguments(a); !status.ok()) {
        std::fprintf(stderr, "tessera bench serve: %s\n", status.message().c_str());
        return 2;
    }
    return std::nullopt;
}

Result<LoadTarget> target_of(const Arguments& a) {
    LoadTarget plain;
    plain.host = a.host;
    plain.port = std::to_string(a.port);
    Result<LoadTarget> target = std::move(plain);
    if (!a.base_url.empty()) {
        target = parse_base_url(a.base_url);
    }
    if (target.ok()) {
        target->api_key = a.api_key;
    }
    return target;
}

Result<std::string> first_model(const LoadTarget& target) {
    const Result<std::string> text = http_get(target, "/v1/models");
    if (!text.ok()) {
        return text.status();
    }
    const Result<json::Value> list = json::parse(*text);
    const json::Value* data = list.ok() ? list->find("data") : nullptr;
    const json::Value* id = data == nullptr || data->items().empty() ? nullptr : data->items()[0].find("id");
    if (id == nullptr || !id->is_string()) {
        return invalid_argument("the server's /v1/models names no model; give --model");
    }
    return id->as_string();
}

Result<std::vector<LoadPrompt>> prompts_of(Arguments& a) {
    a.file.count = a.num_prompts;
    if (a.dataset == "mooncake") {
        return mooncake_prompts(a.file);
    }
    if (a.dataset == "custom") {
        return custom_prompts(a.file);
    }
    a.random.count = a.num_prompts == 0 ? 100 : a.num_prompts;
    return random_prompts(a.random);
}

// A trace's own times, or gamma-distributed gaps (Poisson arrivals at burstiness 1), or all at once.
std::vector<TimeNs> arrivals_of(const Arguments& a, const std::vector<LoadPrompt>& prompts) {
    std::mt19937_64 random(a.random.seed ^ 0x9E3779B97F4A7C15ULL);
    std::gamma_distribution<double> gap_s(a.burstiness, a.rate > 0 ? 1 / (a.rate * a.burstiness) : 1);
    std::vector<TimeNs> arrivals;
    double at_s = 0;
    for (const LoadPrompt& prompt : prompts) {
        if (a.rate > 0) {
            arrivals.push_back(static_cast<TimeNs>(at_s * static_cast<double>(kNsPerSecond)));
            at_s += gap_s(random);
        } else {
            arrivals.push_back(std::max<TimeNs>(0, prompt.arrival));
        }
    }
    return arrivals;
}

std::string body_of(const Arguments& a, const LoadPrompt& prompt) {
    const bool chat = a.endpoint == "chat";
    std::string body = "{\"model\":";
    json::append_string(body, a.model);
    if (chat) {
        body += ",\"messages\":[{\"role\":\"user\",\"content\":";
        json::append_string(body, prompt.text.empty() ? prompt_words(prompt) : prompt.text);
        body += "}]";
    } else if (prompt.text.empty()) {
        body += ",\"prompt\":" + prompt_ids_json(prompt, a.ids);
    } else {
        body += ",\"prompt\":";
        json::append_string(body, prompt.text);
    }
    return body + fmt::format(
                      ",\"max_tokens\":{},\"temperature\":{},\"ignore_eos\":{},\"stream\":true,"
                      "\"stream_options\":{{\"include_usage\":true}}}}",
                      prompt.output_tokens, a.temperature, !a.honor_eos);
}

void show_progress(size_t done, size_t running, size_t total) {
    std::fprintf(stderr, "\r%zu of %zu answered, %zu running   %s", done, total, running,
                 done == total ? "\n" : "");
}

json::Value result_json(const Arguments& a, const LoadMetrics& metrics, size_t prompts) {
    json::Value object = json::Value::object();
    object.set("backend", a.endpoint == "chat" ? "openai-chat" : "openai");
    object.set("model_id", a.model);
    object.set("dataset_name", a.dataset);
    object.set("num_prompts", static_cast<int64_t>(prompts));
    object.set("request_rate", a.rate > 0 ? json::Value(a.rate) : json::Value("inf"));
    object.set("burstiness", a.burstiness);
    object.set("max_concurrency", a.max_concurrency > 0 ? json::Value(a.max_concurrency) : json::Value());
    object.set("seed", a.random.seed);
    const json::Value figures = metrics_json(metrics, a.goodput.any());
    for (const auto& [name, value] : figures.members()) {
        object.set(name, value);
    }
    return object;
}

Status save(const std::string& path, json::Value object, const LoadOutcome& outcome) {
    add_details(object, outcome);
    std::ofstream out(path);
    out << json::dump(object) << '\n';
    out.flush();
    return out.good() ? Status() : invalid_argument(fmt::format("{}: cannot be written", path));
}

int report(const Arguments& a, const LoadOutcome& outcome) {
    const LoadMetrics metrics = measure(outcome, a.goodput);
    std::fputs(metrics_table(metrics, a.goodput.any()).c_str(), stderr);
    for (const LoadResult& result : outcome.results) {
        if (!result.error.empty()) {
            std::fprintf(stderr, "first failure: %s\n", result.error.c_str());
            break;
        }
    }
    const json::Value object = result_json(a, metrics, outcome.results.size());
    std::puts(json::dump(object).c_str());
    if (!a.save_result.empty()) {
        if (const Status status = save(a.save_result, object, outcome); !status.ok()) {
            return fail(status);
        }
    }
    return metrics.failed > 0 ? 1 : 0;
}

}  // namespace

int run_bench_serve(int argc, char** argv) {
    Arguments a;
    if (const std::optional<int> status = parse(argc, argv, a)) {
        return *status;
    }
    const Result<LoadTarget> target = target_of(a);
    if (!target.ok()) {
        return fail(target.status());
    }
    const Result<std::vector<LoadPrompt>> prompts = prompts_of(a);
    if (!prompts.ok()) {
        return fail(prompts.status());
    }
    const Result<std::string> model = a.model.empty() ? first_model(*target) : Result<std::string>(a.model);
    if (!model.ok()) {
        return fail(model.status());
    }
    a.model = *model;
    LoadPlan plan{.target = *target,
                  .path = a.endpoint == "chat" ? "/v1/chat/completions" : "/v1/completions",
                  .arrivals = arrivals_of(a, *prompts),
                  .body = [&](size_t i) { return body_of(a, (*prompts)[i]); },
                  .concurrency_max = a.max_concurrency,
                  .timeout_s = a.timeout_s,
                  .progress = {}};
    if (::isatty(STDERR_FILENO) != 0) {
        plan.progress = [&](size_t done, size_t running) { show_progress(done, running, prompts->size()); };
    }
    return report(a, run_load(plan));
}

}  // namespace tessera

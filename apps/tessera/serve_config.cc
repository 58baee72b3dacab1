#include "serve_config.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fmt/format.h>
#include <fstream>
#include <iostream>
#include <thread>
#include <unistd.h>
#include <utility>

#include "cli.h"
#include "model_options.h"
#include "model_setup.h"
#include "server/openai_service.h"
#include "types/page_format.h"
#include "weights/loader.h"

namespace tessera {
namespace {

// Values that need more than one step from text to the configuration.
struct RawFlags {
    std::vector<std::string> allowed_origins, allowed_hosts;
    std::string key_file, chat_template_kwargs = "{}", generation_config = "auto", log_level = "info", parser,
                          dtype;
    std::string speculative;
    std::string model, model_flag;
    int64_t pool_tokens = 0;
    int block_size = static_cast<int>(kPageTokens);
    int tensor_parallel = 1;
    double target_tpot_ms = 50;  // the promise of the service level that Tessera is built for
    bool ignored = false;
};

void add_model_flags(CLI::App& app, ServeConfig& c, RawFlags& raw) {
    app.add_option("MODEL", raw.model, "model folder in Hugging Face layout");
    app.add_option("--model,--model-path", raw.model_flag,
                   "the model folder, where it is not given by place");
    app.add_option("--served-model-name", c.served_model_names,
                   "names that requests may use; default: the folder's name, and the folder as given");
    add_model_options(app, c.engine);
    app.add_option("--tensor-parallel-size,--tp-size,--tp", raw.tensor_parallel,
                   "1: more ranks are not built yet")
        ->capture_default_str();
    app.add_option("--generation-config", raw.generation_config,
                   "sampling defaults: auto = the model folder's generation_config.json, vllm = neutral")
        ->check(CLI::IsMember({"auto", "vllm"}))
        ->capture_default_str();
    app.add_option("--default-chat-template-kwargs", raw.chat_template_kwargs,
                   "JSON object, e.g. '{\"reasoning_effort\": \"high\"}'; a request's own go first");
    app.add_option("--seed", c.seed, "of requests without a seed; default: random")
        ->check(whole_number(INT64_MAX));
}

void add_engine_flags(CLI::App& app, ServeConfig& c, RawFlags& raw) {
    app.add_option("--block-size,--page-size", raw.block_size, "tokens of a KV page: 64")
        ->capture_default_str();
    add_size_options(app, c.engine);
    app.add_option("--gpu-memory-utilization,--mem-fraction-static", c.engine.gpu_memory_utilization,
                   "CUDA: the share of the device's memory for weights, KV pool and workspaces")
        ->check(number_range(0.01, 1.0))
        ->capture_default_str();
    auto* bytes = app.get_option("--kv-cache-memory-bytes");
    auto* pages =
        app.add_option("--num-gpu-blocks-override", c.engine.num_pages, "the KV pool's size in pages")
            ->check(CLI::Range(0, 1 << 30))
            ->excludes(bytes);
    app.add_option("--max-total-tokens", raw.pool_tokens, "the KV pool's size in tokens")
        ->transform(size_value())
        ->excludes(bytes)
        ->excludes(pages);
    app.add_flag("--enable-prefix-caching,!--no-enable-prefix-caching,!--disable-radix-cache",
                 c.engine.prefix_caching, "reuse the KV pages of equal prompt beginnings (on by default)");
    app.add_option("--target-tpot-ms", raw.target_tpot_ms,
                   "beside decoding streams a prefill is cut so that a step stays under this; 0 = never cut")
        ->check(number_range(0.0, 60'000.0))
        ->capture_default_str();
    app.add_option("--max-num-queued-reqs,--max-queued-requests", c.engine.max_queued_requests,
                   "waiting requests; beyond it 429 with Retry-After")
        ->check(CLI::Range(1, 1 << 24))
        ->capture_default_str();
    app.add_option("--max-num-queued-tokens", c.engine.max_queued_tokens,
                   "prompt tokens of waiting requests; 0 = no limit")
        ->transform(size_value());
    app.add_option("--request-timeout", c.request_timeout_s,
                   "seconds from a request's arrival to its end; 0 = none")
        ->check(number_range(0.0, 1e6));
    app.add_option("--shutdown-timeout", c.shutdown_timeout_s,
                   "seconds that SIGTERM leaves running requests; a second signal exits at once")
        ->check(number_range(0.0, 1e6))
        ->capture_default_str();
}

void add_http_flags(CLI::App& app, ServeConfig& c, RawFlags& raw) {
    app.add_option("--host", c.http.host, "address to listen on")->capture_default_str();
    app.add_option("--port", c.http.port, "0 = any free port")
        ->check(CLI::Range(0, 65535))
        ->capture_default_str();
    app.add_option(
           "--api-key", c.http.api_keys,
           "a key that clients must send, several by repeating it (other users of the machine can see "
           "it here; not so in --api-key-file, TESSERA_API_KEY or VLLM_API_KEY)")
        ->allow_extra_args(false);
    app.add_option("--api-key-file", raw.key_file, "file with a key a line (# starts a comment)");
    auto* key = app.add_option("--ssl-keyfile", c.http.tls_key_file, "the TLS key, PEM");
    auto* cert = app.add_option("--ssl-certfile", c.http.tls_cert_file, "the TLS certificate chain, PEM");
    key->needs(cert);
    cert->needs(key);
    app.add_option("--allowed-origins", raw.allowed_origins,
                   "web origins whose pages may call the API (CORS), e.g. https://app.example; * = all");
    app.add_option(
        "--allowed-hosts", raw.allowed_hosts,
        "names that clients may call this server by, beside localhost and --host: name or name:port");
    app.add_option("--max-request-body-bytes", c.http.body_bytes_max, "a larger request gets 413")
        ->transform(size_value())
        ->check(CLI::Range(size_t{1}, size_t{1} << 40))
        ->capture_default_str();
    app.add_option("--max-connections", c.http.connections_max, "open connections; more get 503")
        ->check(CLI::Range(1, 1 << 20))
        ->capture_default_str();
    app.add_flag("--cache-salt-shared", c.share_cache_between_keys,
                 "API keys share cached prompts (their timing tells)");
    app.add_flag("--enable-force-include-usage", c.force_include_usage, "every stream ends with its usage");
    app.add_flag("--enable-log-requests,--log-requests", c.http.log_requests,
                 "log a line a request: id, path, status, time; never what it says");
    app.add_option("--log-level", raw.log_level, "debug, info, warning, error or off")
        ->check(CLI::IsMember({"debug", "info", "warning", "error", "off"}))
        ->capture_default_str();
    app.add_flag("--print-config", c.print_config, "print the resolved configuration as JSON and exit");
}

// Flags that ask for what is always done, and flags whose feature is still to come.
void add_compatibility_flags(CLI::App& app, RawFlags& raw) {
    const std::string group = "Accepted, since they ask for what is done anyway";
    app.add_option("--tool-call-parser", raw.parser)
        ->check(CLI::IsMember({"hy_v3", "hunyuan"}))
        ->group(group);
    app.add_option("--reasoning-parser", raw.parser)
        ->check(CLI::IsMember({"hy_v3", "hunyuan"}))
        ->group(group);
    app.add_option("--dtype", raw.dtype)->check(CLI::IsMember({"auto", "bfloat16", "float32"}))->group(group);
    for (const char* name : {"--enable-auto-tool-choice", "--trust-remote-code", "--enable-chunked-prefill",
                             "--async-scheduling", "--enable-prompt-tokens-details",
                             "--enable-request-id-headers", "--enable-metrics", "--enable-cache-report",
                             "--disable-log-requests", "--no-enable-log-requests"}) {
        app.add_flag(name, raw.ignored)->group(group);
    }
    for (const char* name : {"--speculative-config", "--speculative-config.method",
                             "--speculative-config.num_speculative_tokens", "--speculative-algorithm"}) {
        app.add_option(name, raw.speculative)->group("");
    }
}

int usage_error(std::string_view message) {
    std::fprintf(stderr, "tessera serve: %.*s\n", static_cast<int>(message.size()), message.data());
    return 2;
}

// vLLM's flags take a JSON list of strings; the parser has split it and left the quotes.
void append_list(const std::vector<std::string>& values, std::vector<std::string>& out) {
    for (const std::string& value : values) {
        const size_t begin = value.find_first_not_of(" \"");
        const size_t end = value.find_last_not_of(" \"");
        if (begin != std::string::npos) {
            out.push_back(value.substr(begin, end - begin + 1));
        }
    }
}

std::optional<std::string> read_keys(const std::string& file, std::vector<std::string>& keys) {
    for (const char* name : {"TESSERA_API_KEY", "VLLM_API_KEY"}) {
        if (const char* value = std::getenv(name); value != nullptr && *value != '\0') {
            keys.emplace_back(value);
        }
    }
    if (!file.empty()) {
        std::ifstream in(file);
        const size_t before = keys.size();
        for (std::string line; std::getline(in, line);) {
            while (!line.empty() && std::isspace(static_cast<unsigned char>(line.back())) != 0) {
                line.pop_back();
            }
            if (!line.empty() && line[0] != '#') {
                keys.push_back(line);
            }
        }
        if (keys.size() == before) {
            return fmt::format("--api-key-file: '{}' cannot be read or holds no key", file);
        }
    }
    if (std::ranges::find(keys, "") != keys.end()) {
        return "--api-key: an empty key would let everyone in";
    }
    return std::nullopt;
}

// A template's variables: the message when they are none, or when they would fail requests.
std::optional<std::string> read_template_kwargs(const std::string& text, json::Value& out) {
    Result<json::Value> kwargs = json::parse(text);
    if (!kwargs.ok() || !kwargs->is_object()) {
        return fmt::format("--default-chat-template-kwargs: not a JSON object: {}", text);
    }
    if (const Status status = check_default_template_kwargs(*kwargs); !status.ok()) {
        return fmt::format("--default-chat-template-kwargs: {}", status.message());
    }
    out = kwargs.take();
    return std::nullopt;
}

// What is compared with texts that clients send must be able to match one of them.
std::optional<std::string> check_names(const ServeConfig& c) {
    if (std::ranges::find(c.served_model_names, "") != c.served_model_names.end()) {
        return "--served-model-name: a name must not be empty";
    }
    for (const std::string& origin : c.http.allowed_origins) {
        const size_t scheme = origin.find("://");
        const bool bare = scheme != std::string::npos && scheme > 0 && scheme + 3 < origin.size() &&
                          origin.find('/', scheme + 3) == std::string::npos;
        if (origin != "*" && origin != "null" && !bare) {
            return fmt::format(
                "--allowed-origins: '{}' is no web origin: give scheme://host[:port] without a path, or *",
                origin);
        }
    }
    return std::nullopt;
}

// What single flags cannot check; the message when something is wrong.
std::optional<std::string> resolve(ServeConfig& c, const RawFlags& raw) {
    if (!raw.model.empty() && !raw.model_flag.empty() && raw.model != raw.model_flag) {
        return fmt::format("the model folder is given twice, as {} and with --model {}: give it once",
                           raw.model, raw.model_flag);
    }
    c.engine.model = raw.model.empty() ? raw.model_flag : raw.model;
    if (c.engine.model.empty()) {
        return "a model folder is required: tessera serve MODEL (--help explains)";
    }
    c.engine.max_num_batched_tokens = batched_tokens(c.engine);
    if (raw.tensor_parallel != 1) {
        return fmt::format("--tensor-parallel-size {}: only 1 is built yet", raw.tensor_parallel);
    }
    if (raw.block_size != kPageTokens) {
        return fmt::format("--block-size {}: a KV page has {} tokens", raw.block_size, kPageTokens);
    }
    if (!raw.speculative.empty()) {
        return "speculative decoding is not built yet: leave --speculative-config out";
    }
    const std::string_view activations = c.engine.device == "cpu" ? "float32" : "bfloat16";
    if (!raw.dtype.empty() && raw.dtype != "auto" && raw.dtype != activations) {
        return fmt::format("--dtype {}: on {} activations are {}: auto or {}", raw.dtype, c.engine.device,
                           activations, activations);
    }
    const Result<DType> kv_dtype = parse_kv_dtype(c.engine.device, c.engine.kv_cache_dtype);
    if (!kv_dtype.ok()) {
        return kv_dtype.status().message();
    }
    if (c.engine.num_pages > 0) {
        c.engine.pool_flag = "--num-gpu-blocks-override";
    }
    if (raw.pool_tokens > 0) {
        c.engine.pool_flag = "--max-total-tokens";
        c.engine.num_pages = static_cast<int32_t>(
            std::min<int64_t>((raw.pool_tokens + kPageTokens - 1) / kPageTokens, 1 << 30));
    }
    if (auto wrong = read_template_kwargs(raw.chat_template_kwargs, c.chat_template_kwargs)) {
        return wrong;
    }
    c.engine.target_tpot_s = raw.target_tpot_ms * 1e-3;
    c.authors_sampling_defaults = raw.generation_config == "auto";
    static constexpr std::pair<std::string_view, LogLevel> kLevels[] = {{"debug", LogLevel::kDebug},
                                                                        {"info", LogLevel::kInfo},
                                                                        {"warning", LogLevel::kWarning},
                                                                        {"error", LogLevel::kError},
                                                                        {"off", LogLevel::kOff}};
    c.log_level =
        std::ranges::find(kLevels, raw.log_level, [](const auto& level) { return level.first; })->second;
    if (c.served_model_names.empty()) {
        std::filesystem::path folder = std::filesystem::path(c.engine.model).lexically_normal();
        folder = folder.has_filename() ? folder : folder.parent_path();
        c.served_model_names = {folder.filename().string()};
        if (c.engine.model != c.served_model_names.front()) {
            c.served_model_names.push_back(c.engine.model);  // vLLM's default: the path as it was given
        }
    }
    c.engine.progress = isatty(STDERR_FILENO) != 0;
    append_list(raw.allowed_origins, c.http.allowed_origins);
    append_list(raw.allowed_hosts, c.http.allowed_hosts);
    if (auto wrong = check_names(c)) {
        return wrong;
    }
    return read_keys(raw.key_file, c.http.api_keys);
}

json::Value strings(const std::vector<std::string>& values) {
    json::Value list = json::Value::array();
    for (const std::string& value : values) {
        list.push_back(value);
    }
    return list;
}

}  // namespace

std::optional<int> parse_serve(int argc, char** argv, ServeConfig& config) {
    RawFlags raw;
    CLI::App app("Serves a model over an OpenAI-compatible API, with a chat page at /.");
    app.name("tessera serve");
    // Of a repeated flag the last counts, so that a script's flags can be overruled; lists take all.
    app.option_defaults()->multi_option_policy(CLI::MultiOptionPolicy::TakeLast);
    add_model_flags(app, config, raw);
    add_engine_flags(app, config, raw);
    add_http_flags(app, config, raw);
    add_compatibility_flags(app, raw);
    app.footer(
        "examples:\n"
        "  tessera serve models/demo\n"
        "  tessera serve models/demo --port 9000 --max-model-len 8K --kv-cache-memory-bytes 2GiB\n"
        "  tessera serve models/demo --host 0.0.0.0 --api-key-file keys.txt --ssl-keyfile key.pem "
        "--ssl-certfile cert.pem");
    if (const std::optional<int> status = parse_arguments(app, argc, argv)) {
        return status;
    }
    if (const std::optional<std::string> wrong = resolve(config, raw)) {
        return usage_error(*wrong);
    }
    return std::nullopt;
}

std::string serve_config_json(const ServeConfig& c) {
    // 0 stands for the model's own context; say what that is when the folder tells.
    int64_t max_model_len = c.engine.max_model_len;
    if (max_model_len == 0) {
        const Result<ModelConfig> model = load_model_config(c.engine.model);
        max_model_len = model.ok() ? model->max_position_embeddings : 0;
    }
    const int64_t threads =
        c.engine.threads > 0 ? c.engine.threads : int64_t{std::thread::hardware_concurrency()};
    const json::Value value = json::Value::object({
        {"model", c.engine.model},
        {"served_model_name", strings(c.served_model_names)},
        {"device", c.engine.device},
        {"threads", threads},
        {"tensor_parallel_size", 1},
        {"max_model_len", max_model_len},
        {"kv_cache_dtype",
         std::string(dtype_name(parse_kv_dtype(c.engine.device, c.engine.kv_cache_dtype).value()))},
        {"deterministic", c.engine.deterministic || c.engine.device == "cpu"},
        {"gpu_memory_utilization", c.engine.gpu_memory_utilization},
        {"block_size", kPageTokens},
        {"kv_cache_memory_bytes", c.engine.kv_cache_bytes},
        {"num_gpu_blocks_override", c.engine.num_pages},
        {"enable_prefix_caching", c.engine.prefix_caching},
        {"cache_salt_shared", c.share_cache_between_keys},
        {"max_num_seqs", c.engine.max_num_seqs},
        {"max_num_batched_tokens", c.engine.max_num_batched_tokens},
        {"target_tpot_ms", c.engine.target_tpot_s * 1e3},
        {"max_num_queued_reqs", c.engine.max_queued_requests},
        {"max_num_queued_tokens", c.engine.max_queued_tokens},
        {"request_timeout", c.request_timeout_s},
        {"shutdown_timeout", c.shutdown_timeout_s},
        {"generation_config", c.authors_sampling_defaults ? "auto" : "vllm"},
        {"default_chat_template_kwargs", c.chat_template_kwargs},
        {"seed", c.seed ? json::Value(*c.seed) : json::Value(nullptr)},
        {"host", c.http.host},
        {"port", c.http.port},
        {"api_keys", static_cast<int64_t>(c.http.api_keys.size())},
        {"ssl_keyfile", c.http.tls_key_file},
        {"ssl_certfile", c.http.tls_cert_file},
        {"allowed_origins", strings(c.http.allowed_origins)},
        {"allowed_hosts", strings(c.http.allowed_hosts)},
        {"max_request_body_bytes", static_cast<int64_t>(c.http.body_bytes_max)},
        {"max_connections", static_cast<int64_t>(c.http.connections_max)},
        {"enable_force_include_usage", c.force_include_usage},
        {"enable_log_requests", c.http.log_requests},
    });
    return json::dump(value);
}

}  // namespace tessera

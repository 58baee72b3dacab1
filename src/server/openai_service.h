// The OpenAI-compatible service: HTTP bodies -> validated requests -> the engine -> answers, streamed or
// whole.
#pragma once

#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "base/json.h"
#include "base/status.h"
#include "engine/engine.h"
#include "server/http.h"
#include "text/tokenizer.h"
#include "types/model_config.h"

namespace tessera {

class ServerMetrics;

// Bounds on what one client may ask for; each has an error that names the field and the bound.
struct OpenAiLimits {
    int32_t n_max = 128;
    int32_t prompts_max = 128;    // prompts in one completion request
    int32_t sequences_max = 256;  // n times the prompts
    int32_t stop_strings_max = 16;
    int32_t stop_string_bytes_max = 1024;
    int32_t messages_max = 16384;
    int32_t tools_max = 1024;
    int32_t name_bytes_max = 128;  // a tool's name
    int32_t salt_bytes_max = 256;
};

struct OpenAiConfig {
    std::vector<std::string> served_model_names;  // at least one; answers carry the first
    std::string model_root;                       // shown by /v1/models
    int32_t max_model_len = 0;                    // prompt + output, at most
    int32_t vocab_size = 0;                       // ids in a request lie in [0, vocab_size)
    GenerationDefaults defaults;                  // neutral with --generation-config vllm
    json::Value default_chat_template_kwargs = json::Value::object();
    std::optional<uint64_t>
        seed;  // requests without a seed of their own draw from it, in their order; unset = random
    std::chrono::milliseconds request_deadline{0};    // from arrival to the last token; 0 = none
    bool share_cache_between_keys = false;            // else an API key's pages serve that key alone
    bool force_include_usage = false;                 // streams carry usage without being asked
    int64_t created = 0;                              // Unix time of the model's loading, for /v1/models
    std::chrono::milliseconds ping_interval{15'000};  // of silence on a stream
    OpenAiLimits limits;
};

// An error when OpenAiConfig::default_chat_template_kwargs would fail every request, or be lost in each.
Status check_default_template_kwargs(const json::Value& kwargs);

// The messages of {"messages": [...], "tools"?}, checked and as the conversation format takes them: what a
// request may hold, and nothing else.
Result<json::Value> read_conversation(const json::Value& conversation);

// Thread-safe. The engine, the tokenizer and the metrics must outlive every request that it has submitted;
// the service itself need not (its routes and running answers share what they need).
class OpenAiService {
  public:
    // metrics may be null.
    OpenAiService(OpenAiConfig config, Engine& engine, const Tokenizer& tokenizer, ServerMetrics* metrics);

    // POST /v1/chat/completions, /v1/completions, /tokenize, /detokenize; GET /v1/models and /v1/models/* (a
    // path that ends in '*' matches every path with that prefix).
    std::vector<HttpRoute> routes() const;

    struct Context;  // what handlers and running answers share

  private:
    std::shared_ptr<const Context> context_;
};

}  // namespace tessera

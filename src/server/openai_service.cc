#include "server/openai_service.h"

#include <algorithm>
#include <fmt/format.h>
#include <utility>

#include "server/metrics.h"
#include "server/openai/chat_request.h"
#include "server/openai/completion_request.h"
#include "server/openai/context.h"
#include "server/openai/response_stream.h"
#include "server/openai/tokenize_routes.h"

namespace tessera {
namespace {

using Context = OpenAiService::Context;
using ContextPtr = std::shared_ptr<const Context>;
using ExchangePtr = std::shared_ptr<HttpExchange>;

// ---------------------------------------------------------------------------------------------------------------
// From a validated request to what the engine takes

// A parser holds its choice's tools; this bounds what they take together (a value is about 100 bytes).
constexpr size_t kToolValuesMax = size_t{1} << 20;

size_t count_values(const json::Value& value) {
    size_t count = 1;
    for (const json::Value& item : value.items()) {
        count += count_values(item);
    }
    for (const json::Member& member : value.members()) {
        count += count_values(member.second);
    }
    return count;
}

// How many tokens a prompt may get: what was asked, or the rest of the context.
std::optional<ApiError> resolve_max_tokens(const OpenAiConfig& config, size_t prompt_tokens,
                                           CommonFields& common, std::string_view prompt_field) {
    if (prompt_tokens == 0) {
        return invalid_field(std::string(prompt_field),
                             fmt::format("'{}' must hold at least one token", prompt_field));
    }
    const int64_t asked = common.max_tokens.value_or(1);
    const int64_t total =
        static_cast<int64_t>(prompt_tokens) + std::max<int64_t>(asked, common.sampling.min_tokens);
    if (total > config.max_model_len) {
        // The field that is at fault: the prompt where it leaves no room at all, else what asks for the
        // answer.
        const bool no_room = static_cast<int64_t>(prompt_tokens) >= config.max_model_len;
        const std::string_view limit =
            common.sampling.min_tokens > asked ? "min_tokens" : common.max_tokens_field;
        return invalid_field(
            std::string(no_room ? prompt_field : limit),
            fmt::format(
                "this model's context is {} tokens, and the request needs {}: {} of the prompt and at least "
                "{} of the answer. Shorten the prompt{}",
                config.max_model_len, total, prompt_tokens, total - static_cast<int64_t>(prompt_tokens),
                no_room ? std::string() : fmt::format(" or lower {}", limit)),
            "context_length_exceeded");
    }
    const int64_t rest = config.max_model_len - static_cast<int64_t>(prompt_tokens);
    common.sampling.max_tokens = static_cast<int32_t>(common.max_tokens ? asked : rest);
    return std::nullopt;
}

// Pages serve one API key unless the operator shares them; a salt of the client's own replaces that rule. The
// prefixes keep the two kinds apart, so that no salt can name another key's pages.
std::string page_salt(const OpenAiConfig& config, const CommonFields& common, const std::string& tenant) {
    if (!common.cache_salt.empty()) {
        return "salt:" + common.cache_salt;
    }
    return config.share_cache_between_keys || tenant.empty() ? "" : "tenant:" + tenant;
}

// Choice i of a prompt draws with seed + i, so that a repeated request gets the same choices.
uint64_t choice_seed(const Context& context, const CommonFields& common, int32_t i) {
    return common.seed ? static_cast<uint64_t>(*common.seed) + static_cast<uint64_t>(i)
                       : context.seeds.next();
}

TokenStreamConfig stream_config(const CommonFields& common) {
    TokenStreamConfig config;
    config.skip_special = common.skip_special;
    config.stop = common.stop;
    config.stop_ids = common.sampling.stop_ids;
    config.include_stop = common.include_stop;
    config.min_tokens = common.sampling.min_tokens;
    return config;
}

ResponsePlan response_plan(const Context& context, const HttpRequest& http, const CommonFields& common,
                           bool chat, TimeNs received) {
    ResponsePlan plan;
    const std::string& id = common.request_id.empty() ? http.request_id : common.request_id;
    plan.writer.chat = chat;
    plan.writer.id = (chat ? "chatcmpl-" : "cmpl-") + (id.empty() ? context.random.hex(32) : id);
    plan.writer.created =
        std::chrono::duration_cast<std::chrono::seconds>(std::chrono::system_clock::now().time_since_epoch())
            .count();
    plan.writer.model = context.config.served_model_names.front();
    plan.writer.token_ids = common.return_token_ids;
    plan.writer.usage_member = common.include_usage;
    plan.stream = common.stream;
    plan.include_usage = common.include_usage;
    plan.continuous_usage = common.continuous_usage;
    plan.n = common.n;
    plan.received = received;
    return plan;
}

// What all sequences of a client's request have in common.
struct Incoming {
    const Context& context;
    const HttpRequest& http;
    const CommonFields& common;
};

// Adds the n sequences of one prompt.
void add_sequences(const Incoming& in, const TokenStreamConfig& stream, std::vector<TokenId> prompt,
                   ResponsePlan& plan) {
    const OpenAiConfig& config = in.context.config;
    for (int32_t i = 0; i < in.common.n; ++i) {
        SequencePlan& sequence = plan.sequences.emplace_back();
        sequence.prompt = plan.prompts.size();
        sequence.stream = stream;
        Request& request = sequence.request;
        request.sampling = in.common.sampling;
        request.sampling.seed = choice_seed(in.context, in.common, i);
        request.cache_salt = page_salt(config, in.common, in.http.tenant);
        request.priority = in.common.priority;
        const TimeNs limit = std::chrono::nanoseconds(config.request_deadline).count();
        request.deadline = limit > 0 ? plan.received + limit : 0;
    }
    plan.prompts.push_back(std::move(prompt));
}

void reject(const Context& context, HttpExchange& exchange, const ApiError& error) {
    respond_error(exchange, error);
    if (context.metrics != nullptr) {
        context.metrics->client_request_rejected(error.status);
    }
}

// ---------------------------------------------------------------------------------------------------------------
// Chat

// The function that a forced call must name; empty where `required` leaves a choice between several.
std::string_view forced_name(const ChatRequest& chat) {
    if (chat.tool_choice == ToolChoice::kNamed) {
        return chat.tool_name;
    }
    const std::span<const json::Value> tools = chat.prompt.input.tools->items();
    return tools.size() == 1 ? std::string_view(tools[0].find("function")->find("name")->as_string())
                             : std::string_view();
}

// The tokens that open a call, up to the name or, where it is known, through <tool_sep> and its newline, as
// the format writes them; where reasoning comes first they wait for its end.
std::optional<ApiError> force_call(const Context& context, const ChatRequest& chat, OutputStart start,
                                   ForcedTokens& forced) {
    std::string text = context.tokens.tool_calls_begin + "\n" + context.tokens.tool_call_begin;
    if (const std::string_view name = forced_name(chat); !name.empty()) {
        text += name;
        text += context.tokens.tool_sep + "\n";
    }
    Result<std::vector<TokenId>> ids = context.tokenizer.encode(text);
    if (!ids.ok()) {
        return api_error(ids.status());
    }
    forced.tokens = ids.take();
    forced.after = start == OutputStart::kReasoning ? context.think_end : -1;
    return std::nullopt;
}

OutputParserConfig parser_config(const Context& context, const ChatRequest& chat, OutputStart start) {
    OutputParserConfig config;
    config.suffix = context.tokenizer.token_suffix();
    config.start = start;
    // Without thinking, all text is content, whatever it looks like.
    config.parse_reasoning = start == OutputStart::kReasoning;
    config.parse_tools = chat.prompt.has_tools && chat.tool_choice != ToolChoice::kNone;
    if (config.parse_tools) {
        config.tools = *chat.prompt.input.tools;
    }
    if (!chat.parallel_tool_calls || chat.tool_choice == ToolChoice::kNamed) {
        config.tool_calls_max = 1;
    }
    return config;
}

std::optional<ApiError> plan_chat(const Context& context, const HttpRequest& http, ChatRequest& chat,
                                  ResponsePlan& plan) {
    if (chat.prompt.has_tools &&
        count_values(*chat.prompt.input.tools) * static_cast<size_t>(chat.common.n) > kToolValuesMax) {
        return invalid_field("n", "'tools' is too large for so many choices: lower 'n' or send fewer tools");
    }
    const std::string& suffix = context.tokenizer.token_suffix();
    const Result<std::string> text = render_chat(chat.prompt.input, suffix);
    if (!text.ok()) {
        return invalid_field("messages", text.status().message());
    }
    Result<std::vector<TokenId>> prompt = context.tokenizer.encode(*text);
    if (!prompt.ok()) {
        return invalid_field("messages", prompt.status().message());
    }
    if (auto error = resolve_max_tokens(context.config, prompt->size(), chat.common, "messages")) {
        return error;
    }
    const OutputStart start = output_start(*text, suffix);
    if (chat.tool_choice == ToolChoice::kRequired || chat.tool_choice == ToolChoice::kNamed) {
        if (auto error = force_call(context, chat, start, chat.common.sampling.forced)) {
            return error;
        }
    }
    chat.common.sampling.logprobs = chat.logprobs;
    plan.writer.logprobs = chat.logprobs;
    TokenStreamConfig stream = stream_config(chat.common);
    stream.parser = parser_config(context, chat, start);
    stream.think_end = context.think_end;
    add_sequences({context, http, chat.common}, stream, prompt.take(), plan);
    return std::nullopt;
}

void handle_chat(const ContextPtr& context, const ExchangePtr& exchange) {
    const TimeNs received = now_ns();
    const std::optional<json::Value> body = read_body(*exchange);
    if (!body) {
        return;
    }
    ChatRequest chat;
    std::optional<ApiError> error = parse_chat_request(*body, context->config, chat);
    ResponsePlan plan = response_plan(*context, exchange->request(), chat.common, true, received);
    if (!error) {
        error = plan_chat(*context, exchange->request(), chat, plan);
    }
    if (error) {
        reject(*context, *exchange, *error);
        return;
    }
    ResponseStream::start(context, exchange, std::move(plan));
}

// ---------------------------------------------------------------------------------------------------------------
// Text completions

std::optional<ApiError> plan_completion(const Context& context, const HttpRequest& http,
                                        CompletionRequest& request, ResponsePlan& plan) {
    request.common.sampling.logprobs = request.logprobs;
    plan.writer.logprobs = request.logprobs;
    const TokenStreamConfig stream = stream_config(request.common);
    for (TextOrIds& prompt : request.prompts) {
        Result<std::vector<TokenId>> ids = std::vector<TokenId>{};
        if (auto* given = std::get_if<std::vector<TokenId>>(&prompt)) {
            ids = std::move(*given);
        } else {
            ids = context.tokenizer.encode(std::get<std::string>(prompt));
        }
        if (!ids.ok()) {
            return invalid_field("prompt", ids.status().message());
        }
        if (auto error = resolve_max_tokens(context.config, ids->size(), request.common, "prompt")) {
            return error;
        }
        add_sequences({context, http, request.common}, stream, ids.take(), plan);
    }
    return std::nullopt;
}

void handle_completion(const ContextPtr& context, const ExchangePtr& exchange) {
    const TimeNs received = now_ns();
    const std::optional<json::Value> body = read_body(*exchange);
    if (!body) {
        return;
    }
    CompletionRequest request;
    std::optional<ApiError> error = parse_completion_request(*body, context->config, request);
    ResponsePlan plan = response_plan(*context, exchange->request(), request.common, false, received);
    if (!error) {
        error = plan_completion(*context, exchange->request(), request, plan);
    }
    if (error) {
        reject(*context, *exchange, *error);
        return;
    }
    ResponseStream::start(context, exchange, std::move(plan));
}

// ---------------------------------------------------------------------------------------------------------------
// Models

json::Value model_json(const OpenAiConfig& config, const std::string& name) {
    json::Value out = json::Value::object();
    out.set("id", name);
    out.set("object", "model");
    out.set("created", config.created);
    out.set("owned_by", "tessera");
    out.set("root", config.model_root);
    out.set("parent", nullptr);
    out.set("max_model_len", int64_t{config.max_model_len});
    return out;
}

void handle_models(const Context& context, HttpExchange& exchange) {
    json::Value data = json::Value::array();
    for (const std::string& name : context.config.served_model_names) {
        data.push_back(model_json(context.config, name));
    }
    json::Value out = json::Value::object();
    out.set("object", "list");
    out.set("data", std::move(data));
    respond_json(exchange, json::dump(out));
}

// Names may hold slashes, which clients send as they are or as %2F.
std::string percent_decode(std::string_view text) {
    const auto digit = [](char c) {
        return c >= '0' && c <= '9'                     ? c - '0'
               : (c | 0x20) >= 'a' && (c | 0x20) <= 'f' ? (c | 0x20) - 'a' + 10
                                                        : -1;
    };
    std::string out;
    for (size_t i = 0; i < text.size(); ++i) {
        const bool escape =
            text[i] == '%' && i + 2 < text.size() && digit(text[i + 1]) >= 0 && digit(text[i + 2]) >= 0;
        out += escape ? static_cast<char>(digit(text[i + 1]) * 16 + digit(text[i + 2])) : text[i];
        i += escape ? 2 : 0;
    }
    return out;
}

void handle_model(const Context& context, HttpExchange& exchange) {
    constexpr std::string_view kPrefix = "/v1/models/";
    const std::string name = percent_decode(std::string_view(exchange.request().path).substr(kPrefix.size()));
    const auto& served = context.config.served_model_names;
    if (std::find(served.begin(), served.end(), name) != served.end()) {
        respond_json(exchange, json::dump(model_json(context.config, name)));
        return;
    }
    ApiError error = invalid_field("model",
                                   fmt::format("the model {} does not exist here; served: {}",
                                               describe(json::Value(name)), fmt::join(served, ", ")),
                                   "model_not_found");
    error.status = 404;
    respond_error(exchange, error);
}

}  // namespace

OpenAiService::OpenAiService(OpenAiConfig config, Engine& engine, const Tokenizer& tokenizer,
                             ServerMetrics* metrics) {
    check(!config.served_model_names.empty(), "the service needs a model name");
    check(config.max_model_len > 1 && config.vocab_size > 0, "the service needs the model's sizes");
    context_ = std::make_shared<const Context>(std::move(config), engine, tokenizer, metrics);
}

std::vector<HttpRoute> OpenAiService::routes() const {
    const ContextPtr context = context_;
    const auto post = [](std::string path, HttpHandler handler) {
        return HttpRoute{
            .method = "POST", .path = std::move(path), .handler = std::move(handler), .json_body = true};
    };
    const auto get = [](std::string path, HttpHandler handler) {
        return HttpRoute{.method = "GET", .path = std::move(path), .handler = std::move(handler)};
    };
    return {
        post("/v1/chat/completions", [context](ExchangePtr exchange) { handle_chat(context, exchange); }),
        post("/v1/completions", [context](ExchangePtr exchange) { handle_completion(context, exchange); }),
        post("/tokenize", [context](ExchangePtr exchange) { handle_tokenize(*context, *exchange); }),
        post("/detokenize", [context](ExchangePtr exchange) { handle_detokenize(*context, *exchange); }),
        get("/v1/models", [context](ExchangePtr exchange) { handle_models(*context, *exchange); }),
        get("/v1/models/*", [context](ExchangePtr exchange) { handle_model(*context, *exchange); }),
    };
}

}  // namespace tessera

#include "server/openai/tokenize_routes.h"

#include <fmt/format.h>
#include <utility>

#include "base/utf8.h"
#include "server/openai/chat_request.h"

namespace tessera {
namespace {

// A JSON value takes some fifty times the bytes of its shortest text, "0,": this bounds what one body can
// make of memory.
constexpr size_t kValuesMax = size_t{1} << 20;

// Commas and openers outside strings, which bound the number of values.
size_t count_values(std::string_view text) {
    size_t count = 1;
    bool quoted = false;
    for (size_t i = 0; i < text.size(); ++i) {
        const char c = text[i];
        if (quoted) {
            i += c == '\\' ? 1 : 0;
            quoted = c != '"';
        } else {
            quoted = c == '"';
            count += c == ',' || c == '[' || c == '{' ? 1 : 0;
        }
    }
    return count;
}

std::optional<ApiError> tokenize_text(const OpenAiService::Context& context, const json::Value& body,
                                      std::string& text) {
    FieldReader reader(body);
    check_model(reader, context.config);
    const std::optional<std::string> prompt = reader.string("prompt", SIZE_MAX);
    if (!prompt) {
        reader.fail("prompt", "'prompt' must be a string (or send 'messages' for the chat form)");
    }
    reader.boolean("add_special_tokens", false);
    text = prompt.value_or("");
    return reader.error();
}

std::optional<ApiError> tokenize_chat(const OpenAiService::Context& context, const json::Value& body,
                                      std::string& text) {
    ChatPrompt prompt;
    if (auto error = parse_chat_prompt(body, context.config, prompt)) {
        return error;
    }
    Result<std::string> rendered = render_chat(prompt.input, context.tokenizer.token_suffix());
    if (!rendered.ok()) {
        return api_error(rendered.status());
    }
    text = rendered.take();
    return std::nullopt;
}

}  // namespace

std::optional<json::Value> read_body(HttpExchange& exchange) {
    const std::string& text = exchange.request().body;
    if (count_values(text) > kValuesMax) {
        respond_error(exchange,
                      invalid_field("", fmt::format("the body holds more than {} JSON values", kValuesMax)));
        return std::nullopt;
    }
    Result<json::Value> body = json::parse(text);
    if (!body.ok()) {
        respond_error(
            exchange,
            invalid_field("", fmt::format("the body is not valid JSON: {}", body.status().message()),
                          "invalid_json"));
        return std::nullopt;
    }
    if (!body->is_object()) {
        respond_error(exchange, invalid_field("", fmt::format("the body must be a JSON object, not {}",
                                                              json::type_name(body->type()))));
        return std::nullopt;
    }
    return body.take();
}

void handle_tokenize(const OpenAiService::Context& context, HttpExchange& exchange) {
    const std::optional<json::Value> body = read_body(exchange);
    if (!body) {
        return;
    }
    FieldReader reader(*body);
    const bool with_texts = reader.boolean("return_token_strs", false);
    std::string text;
    std::optional<ApiError> error = reader.error();
    if (!error) {
        error = body->find("messages") != nullptr ? tokenize_chat(context, *body, text)
                                                  : tokenize_text(context, *body, text);
    }
    Result<std::vector<TokenId>> ids = error ? std::vector<TokenId>{} : context.tokenizer.encode(text);
    if (!error && !ids.ok()) {
        error = api_error(ids.status());
    }
    if (error) {
        respond_error(exchange, *error);
        return;
    }
    std::string out = fmt::format(R"({{"count":{},"max_model_len":{},"tokens":[{}],"token_strs":)",
                                  ids->size(), context.config.max_model_len, fmt::join(*ids, ","));
    if (with_texts) {
        json::Value texts = json::Value::array();
        for (const TokenId id : *ids) {
            texts.push_back(utf8_replace_invalid(context.tokenizer.token_bytes(id)));
        }
        out += json::dump(texts);
    } else {
        out += "null";
    }
    respond_json(exchange, out + "}");
}

void handle_detokenize(const OpenAiService::Context& context, HttpExchange& exchange) {
    const std::optional<json::Value> body = read_body(exchange);
    if (!body) {
        return;
    }
    FieldReader reader(*body);
    check_model(reader, context.config);
    const std::vector<TokenId> ids = reader.token_ids("tokens", context.config.vocab_size, SIZE_MAX);
    if (reader.get("tokens") == nullptr) {
        reader.fail("tokens", "'tokens' must be an array of token ids");
    }
    if (!reader.ok()) {
        respond_error(exchange, *reader.error());
        return;
    }
    std::string out = R"({"prompt":)";
    json::append_string(out, context.tokenizer.decode(ids, false));
    respond_json(exchange, out + "}");
}

}  // namespace tessera

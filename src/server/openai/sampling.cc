#include "server/openai/sampling.h"

#include <algorithm>
#include <charconv>
#include <fmt/format.h>
#include <limits>
#include <utility>

namespace tessera {
namespace {

constexpr double kGreedyBelow = 1e-5;  // a temperature that only rounding separates from 0
constexpr double kRepetitionPenaltyMin = 0.01;
constexpr size_t kModelNameBytesMax = 1024;
constexpr int32_t kInt32Max = std::numeric_limits<int32_t>::max();

constexpr UnsupportedField kUnsupported[] = {
    {"structured_outputs", "structured output is not offered yet"},
    {"guided_json", "structured output is not offered yet"},
    {"guided_regex", "structured output is not offered yet"},
    {"guided_choice", "structured output is not offered yet"},
    {"guided_grammar", "structured output is not offered yet"},
    {"structural_tag", "structured output is not offered yet"},
    {"json_schema", "structured output is not offered yet"},
    {"grammar", "structured output is not offered yet"},
    {"regex", "structured output is not offered yet"},
    {"ebnf", "structured output is not offered yet"},
    {"stop_regex", "use stop"},
    {"n_predict", "use max_tokens"},
    {"return_tokens_as_token_ids", "use return_token_ids"},
    {"use_beam_search", "beam search is not offered; use n with a temperature"},
    {"echo", "the prompt is not echoed; prepend it yourself"},
    {"prompt_logprobs", "log-probabilities are offered for generated tokens only"},
    {"truncate_prompt_tokens", "prompts are never cut; shorten the prompt yourself"},
    {"bad_words", "use logit_bias with the words' token ids instead"},
    {"allowed_token_ids", "use logit_bias instead"},
    {"logits_processors", "custom code does not run here"},
    {"kv_transfer_params", "KV transfer is not offered"},
    {"thinking_token_budget", "use reasoning_effort instead"},
};

int32_t narrow(int64_t value) {
    return static_cast<int32_t>(value);
}

void read_distribution(FieldReader& reader, const GenerationDefaults& defaults, SamplingParams& out) {
    out.temperature = reader.number("temperature", {0, 2}).value_or(defaults.temperature);
    if (out.temperature < kGreedyBelow) {
        out.temperature = 0;
    }
    out.top_p = reader.number("top_p", {0, 1, true}).value_or(defaults.top_p);
    // -1 is vLLM's spelling of "off".
    out.top_k = narrow(std::max<int64_t>(0, reader.integer("top_k", -1, kInt32Max).value_or(defaults.top_k)));
    out.min_p = reader.number("min_p", {0, 1}).value_or(defaults.min_p);
    out.repetition_penalty =
        reader.number("repetition_penalty", {kRepetitionPenaltyMin, 2}).value_or(defaults.repetition_penalty);
    out.presence_penalty = reader.number("presence_penalty", {-2, 2}).value_or(0);
    out.frequency_penalty = reader.number("frequency_penalty", {-2, 2}).value_or(0);
}

// Keys are decimal token ids, as OpenAI writes them.
void read_logit_bias(FieldReader& reader, int32_t vocab_size, SamplingParams& out) {
    const json::Value* bias = reader.object("logit_bias");
    if (bias == nullptr) {
        return;
    }
    if (bias->members().size() > kLogitBiasMax) {
        reader.fail("logit_bias", fmt::format("'logit_bias' has {} entries; at most {} are allowed",
                                              bias->members().size(), kLogitBiasMax));
        return;
    }
    for (const auto& [key, value] : bias->members()) {
        TokenId id = -1;
        const auto [end, error] = std::from_chars(key.data(), key.data() + key.size(), id);
        if (error != std::errc() || end != key.data() + key.size() || id < 0 || id >= vocab_size) {
            reader.fail("logit_bias",
                        fmt::format("each key of 'logit_bias' must be a token id from 0 to {}, not {}",
                                    vocab_size - 1, describe(json::Value(key))));
            return;
        }
        if (!value.is_number() || !(value.as_double() >= -100 && value.as_double() <= 100)) {
            reader.fail("logit_bias",
                        fmt::format("'logit_bias' of {} must be a number from -100 to 100, not {}", id,
                                    describe(value)));
            return;
        }
        out.logit_bias.emplace_back(id, static_cast<float>(value.as_double()));
    }
}

std::vector<std::string> read_stop(FieldReader& reader, const OpenAiLimits& limits) {
    const json::Value* stop = reader.get("stop");
    if (stop == nullptr) {
        return {};
    }
    if (!stop->is_string() && !stop->is_array()) {
        reader.fail("stop",
                    fmt::format("'stop' must be a string or an array of strings, not {}", describe(*stop)));
        return {};
    }
    const std::vector<json::Value> single = {*stop};
    const std::vector<json::Value>& items = stop->is_array() ? stop->items() : single;
    if (items.size() > static_cast<size_t>(limits.stop_strings_max)) {
        reader.fail("stop", fmt::format("'stop' has {} strings; at most {} are allowed", items.size(),
                                        limits.stop_strings_max));
        return {};
    }
    std::vector<std::string> out;
    for (const json::Value& item : items) {
        if (!item.is_string() || item.as_string().empty() ||
            item.as_string().size() > static_cast<size_t>(limits.stop_string_bytes_max)) {
            reader.fail("stop", fmt::format("each string of 'stop' must have 1 to {} bytes, not be {}",
                                            limits.stop_string_bytes_max, describe(item)));
            return {};
        }
        out.push_back(item.as_string());
    }
    return out;
}

void read_stream_options(FieldReader& reader, const OpenAiConfig& config, CommonFields& out) {
    out.stream = reader.boolean("stream", false);
    const json::Value* options = reader.object("stream_options");
    if (options != nullptr) {
        if (!out.stream) {
            reader.fail("stream_options", "'stream_options' is only allowed when 'stream' is true");
            return;
        }
        FieldReader nested(*options, "stream_options");
        out.include_usage = nested.boolean("include_usage", false);
        out.continuous_usage = nested.boolean("continuous_usage_stats", false) && out.include_usage;
        if (!nested.ok()) {
            reader.fail(*nested.error());
        }
    }
    out.include_usage = out.include_usage || (out.stream && config.force_include_usage);
}

bool printable(std::string_view text) {
    return std::all_of(text.begin(), text.end(), [](char c) { return c > ' ' && c < '\x7f'; });
}

// Names that end up in ids, headers and page keys.
void read_identity(FieldReader& reader, const OpenAiConfig& config, CommonFields& out) {
    out.priority =
        narrow(reader.integer("priority", std::numeric_limits<int32_t>::min(), kInt32Max).value_or(0));
    if (auto salt = reader.string("cache_salt", static_cast<size_t>(config.limits.salt_bytes_max))) {
        if (salt->empty()) {
            reader.fail("cache_salt", "'cache_salt' must not be empty; leave it out for the default");
        }
        out.cache_salt = std::move(*salt);
    }
    if (auto id = reader.string("request_id", static_cast<size_t>(config.limits.name_bytes_max))) {
        if (id->empty() || !printable(*id)) {
            reader.fail("request_id", "'request_id' must be printable ASCII without spaces, and not empty");
        }
        out.request_id = std::move(*id);
    }
}

// response_format {"type":"text"} is the default; the others need structured output.
void check_response_format(FieldReader& reader) {
    const json::Value* format = reader.object("response_format");
    if (format == nullptr) {
        return;
    }
    const json::Value* type = format->find("type");
    const std::string name = type != nullptr && type->is_string() ? type->as_string() : "";
    if (name == "json_object" || name == "json_schema") {
        reader.fail(invalid_field(
            "response_format",
            fmt::format("response_format '{}' is not supported yet; only 'text' is. Ask for JSON "
                        "in the prompt, or use tools",
                        name),
            "unsupported_parameter"));
    } else if (name != "text") {
        reader.fail(invalid_field("response_format.type", "'response_format.type' must be 'text'"));
    }
}

}  // namespace

void reject_unsupported(FieldReader& reader, const UnsupportedField& field) {
    const json::Value* value = reader.get(field.name);
    if (value == nullptr || (value->is_bool() && !value->as_bool()) ||
        (value->is_array() && value->items().empty())) {
        return;
    }
    reader.fail(field.name, fmt::format("'{}' is not supported: {}", field.name, field.why),
                "unsupported_parameter");
}

void check_model(FieldReader& reader, const OpenAiConfig& config) {
    const std::optional<std::string> model = reader.string("model", kModelNameBytesMax);
    const auto& served = config.served_model_names;
    if (!model || std::find(served.begin(), served.end(), *model) != served.end()) {
        return;
    }
    ApiError error = invalid_field("model",
                                   fmt::format("the model {} does not exist here; served: {}",
                                               describe(json::Value(*model)), fmt::join(served, ", ")),
                                   "model_not_found");
    error.status = 404;
    reader.fail(std::move(error));
}

CommonFields read_common_fields(FieldReader& reader, const OpenAiConfig& config) {
    CommonFields out;
    check_model(reader, config);
    for (const UnsupportedField& field : kUnsupported) {
        reject_unsupported(reader, field);
    }
    check_response_format(reader);
    if (reader.integer("best_of", 1, config.limits.n_max).value_or(1) > 1) {
        reader.fail("best_of", "'best_of' above 1 is not supported; use n", "unsupported_parameter");
    }
    if (reader.number("length_penalty", {-10, 10}).value_or(1) != 1) {
        reader.fail("length_penalty", "'length_penalty' belongs to beam search, which is not supported",
                    "unsupported_parameter");
    }
    read_distribution(reader, config.defaults, out.sampling);
    read_logit_bias(reader, config.vocab_size, out.sampling);
    out.seed =
        reader.integer("seed", std::numeric_limits<int64_t>::min(), std::numeric_limits<int64_t>::max());
    out.n = narrow(reader.integer("n", 1, config.limits.n_max).value_or(1));
    out.stop = read_stop(reader, config.limits);
    out.include_stop = reader.boolean("include_stop_str_in_output", false);
    out.skip_special = reader.boolean("skip_special_tokens", true);
    // Hugging Face spaces; byte-level BPE has none to add, so the field is checked and has no effect.
    reader.boolean("spaces_between_special_tokens", true);
    reader.boolean("add_special_tokens", false);
    out.return_token_ids = reader.boolean("return_token_ids", false);
    out.sampling.stop_ids = reader.token_ids("stop_token_ids", config.vocab_size, kStopIdsMax);
    out.sampling.ignore_eos = reader.boolean("ignore_eos", false);
    out.sampling.min_tokens = narrow(reader.integer("min_tokens", 0, config.max_model_len).value_or(0));
    // The bound is the type's: a limit above the context is answered as context_length_exceeded, with both
    // numbers.
    if (auto tokens = reader.integer("max_tokens", 1, kInt32Max)) {
        out.max_tokens = narrow(*tokens);
    }
    if (auto tokens = reader.integer("max_completion_tokens", 1, kInt32Max)) {
        out.max_tokens = narrow(*tokens);
        out.max_tokens_field = "max_completion_tokens";
    }
    if (out.max_tokens && out.sampling.min_tokens > *out.max_tokens) {
        reader.fail("min_tokens", fmt::format("'min_tokens' ({}) must not be above the token limit ({})",
                                              out.sampling.min_tokens, *out.max_tokens));
    }
    read_stream_options(reader, config, out);
    read_identity(reader, config, out);
    return out;
}

}  // namespace tessera

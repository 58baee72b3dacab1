#include "server/openai/chat_request.h"

#include <fmt/format.h>
#include <utility>

#include "server/openai/chat_messages.h"

namespace tessera {
namespace {

constexpr size_t kWordBytesMax = 64;

constexpr UnsupportedField kUnsupported[] = {
    {"functions", "use tools"},
    {"function_call", "use tool_choice"},
    {"audio", "this model writes text only"},
    {"web_search_options", "web search is not offered"},
    {"prediction", "predicted outputs are not offered"},
    {"documents", "put the documents into the messages"},
    {"chat_template", "the conversation format is the model's own and fixed"},
};

// Checks and maps the member `key` of `fields`; null is an error only inside chat_template_kwargs, as in the
// template.
std::optional<std::string> read_effort(FieldReader& reader, std::string_view key) {
    const std::optional<std::string> text = reader.string(key, kWordBytesMax);
    if (!text) {
        return std::nullopt;
    }
    std::optional<std::string> effort = model_reasoning_effort(*text);
    if (!effort) {
        reader.fail(
            key,
            fmt::format("'{}' must be no_think, low or high (none and minimal mean no_think, medium means "
                        "high), not {}",
                        reader.path(key), describe(json::Value(*text))));
    }
    return effort;
}

// default_chat_template_kwargs, then reasoning_effort, then chat_template_kwargs: the later wins.
json::Value read_template_kwargs(FieldReader& reader, const OpenAiConfig& config) {
    json::Value kwargs = config.default_chat_template_kwargs;
    if (auto effort = read_effort(reader, "reasoning_effort")) {
        kwargs.set("reasoning_effort", std::move(*effort));
    }
    const json::Value* given = reader.object("chat_template_kwargs");
    if (given == nullptr) {
        return kwargs;
    }
    FieldReader nested(*given, "chat_template_kwargs");
    const std::optional<std::string> effort = read_effort(nested, "reasoning_effort");
    for (const auto& [key, value] : given->members()) {
        if (key == "messages" || key == "tools") {
            nested.fail(key, fmt::format("'{}' is not allowed: it is a field of its own", nested.path(key)));
        }
        if (key == "reasoning_effort" && value.is_null()) {
            nested.fail(key,
                        "'chat_template_kwargs.reasoning_effort' must be no_think, low or high, not null");
        }
        kwargs.set(key, key == "reasoning_effort" && effort ? json::Value(*effort) : value);
    }
    if (!nested.ok()) {
        reader.fail(*nested.error());
    }
    return kwargs;
}

// add_generation_prompt is true unless the client says otherwise, as OpenAI servers have it. The published
// format leaves a last assistant message open by itself, so continuing one needs no more than a message that
// can be continued.
void read_prompt_end(FieldReader& reader, ChatPrompt& out) {
    const bool continue_final = reader.boolean("continue_final_message", false);
    const bool in_kwargs = out.input.kwargs.find("add_generation_prompt") != nullptr;
    const bool add_generation_prompt = reader.boolean("add_generation_prompt", !continue_final);
    if (!reader.ok()) {
        return;
    }
    if (continue_final) {
        const json::Value& last = out.input.messages.items().back();
        const json::Value* calls = last.find("tool_calls");
        if (last.find("role")->as_string() != "assistant" || (calls != nullptr && !calls->items().empty())) {
            reader.fail("continue_final_message",
                        "'continue_final_message' needs a last message of the assistant without tool calls");
        }
        if (add_generation_prompt) {
            reader.fail("add_generation_prompt",
                        "'add_generation_prompt' and 'continue_final_message' cannot both be true");
        }
    }
    if (!in_kwargs || reader.get("add_generation_prompt") != nullptr) {
        out.input.kwargs.set("add_generation_prompt", add_generation_prompt);
    }
}

void read_prompt(FieldReader& reader, const OpenAiConfig& config, ChatPrompt& out) {
    out.input.messages = read_messages(reader, config.limits);
    if (const json::Value* tools = read_tools(reader, config.limits)) {
        out.input.tools = *tools;
        out.has_tools = true;
    }
    out.input.kwargs = read_template_kwargs(reader, config);
    if (reader.ok()) {
        read_prompt_end(reader, out);
    }
}

bool has_tool(const ChatPrompt& prompt, std::string_view name) {
    for (const json::Value& tool : prompt.input.tools->items()) {
        if (tool.find("function")->find("name")->as_string() == name) {
            return true;
        }
    }
    return false;
}

void read_named_choice(FieldReader& reader, const json::Value& choice, ChatRequest& out) {
    FieldReader outer(choice, "tool_choice");
    if (outer.string("type", kWordBytesMax) != "function") {
        outer.fail("type", "'tool_choice.type' must be 'function'");
    }
    const json::Value* function = outer.object("function");
    const json::Value* name = function == nullptr ? nullptr : function->find("name");
    if (name == nullptr || !name->is_string()) {
        outer.fail("function.name", "'tool_choice.function.name' must be the name of one of the tools");
    } else if (outer.ok() && out.prompt.has_tools && !has_tool(out.prompt, name->as_string())) {
        outer.fail(
            "function.name",
            fmt::format("'tool_choice.function.name' is {}, which none of the tools has", describe(*name)));
    }
    if (!outer.ok()) {
        reader.fail(*outer.error());
        return;
    }
    out.tool_choice = ToolChoice::kNamed;
    out.tool_name = name->as_string();
}

void read_tool_choice(FieldReader& reader, ChatRequest& out) {
    out.parallel_tool_calls = reader.boolean("parallel_tool_calls", true);
    const json::Value* choice = reader.get("tool_choice");
    if (choice == nullptr || !reader.ok()) {
        return;
    }
    if (choice->is_object()) {
        read_named_choice(reader, *choice, out);
    } else if (choice->is_string() && choice->as_string() == "none") {
        out.tool_choice = ToolChoice::kNone;
    } else if (choice->is_string() && choice->as_string() == "required") {
        out.tool_choice = ToolChoice::kRequired;
    } else if (!choice->is_string() || choice->as_string() != "auto") {
        reader.fail("tool_choice",
                    fmt::format("'tool_choice' must be auto, none, required or an object that names a "
                                "function, not {}",
                                describe(*choice)));
    }
    const bool forces = out.tool_choice == ToolChoice::kRequired || out.tool_choice == ToolChoice::kNamed;
    if (forces && !out.prompt.has_tools) {
        reader.fail("tool_choice", "'tool_choice' asks for a call, but 'tools' is missing or empty");
    }
}

void read_logprobs(FieldReader& reader, ChatRequest& out) {
    const bool logprobs = reader.boolean("logprobs", false);
    const std::optional<int64_t> top = reader.integer("top_logprobs", 0, kTopLogprobsMax);
    if (top && !logprobs) {
        reader.fail("top_logprobs", "'top_logprobs' needs 'logprobs' to be true");
    }
    if (logprobs) {
        out.logprobs = static_cast<int32_t>(top.value_or(0));
    }
}

// ["text"] is the default; other modalities are another model's.
void check_modalities(FieldReader& reader) {
    const json::Value* modalities = reader.array("modalities", kWordBytesMax);
    if (modalities == nullptr) {
        return;
    }
    for (const json::Value& item : modalities->items()) {
        if (!item.is_string() || item.as_string() != "text") {
            reader.fail("modalities",
                        fmt::format("'modalities' may hold 'text' only, not {}", describe(item)),
                        "unsupported_parameter");
        }
    }
}

}  // namespace

std::optional<std::string> model_reasoning_effort(std::string_view effort) {
    if (effort == "no_think" || effort == "none" || effort == "minimal") {
        return "no_think";
    }
    if (effort == "low") {
        return "low";
    }
    if (effort == "medium" || effort == "high") {
        return "high";
    }
    return std::nullopt;
}

std::optional<ApiError> parse_chat_request(const json::Value& body, const OpenAiConfig& config,
                                           ChatRequest& out) {
    FieldReader reader(body);
    out.common = read_common_fields(reader, config);
    for (const UnsupportedField& field : kUnsupported) {
        reject_unsupported(reader, field);
    }
    if (!reader.boolean("include_reasoning", true)) {
        reader.fail("include_reasoning",
                    "'include_reasoning' false is not supported: set reasoning_effort to no_think, or drop "
                    "the field reasoning_content",
                    "unsupported_parameter");
    }
    check_modalities(reader);
    read_prompt(reader, config, out.prompt);
    read_tool_choice(reader, out);
    read_logprobs(reader, out);
    return reader.error();
}

std::optional<ApiError> parse_chat_prompt(const json::Value& body, const OpenAiConfig& config,
                                          ChatPrompt& out) {
    FieldReader reader(body);
    check_model(reader, config);
    read_prompt(reader, config, out);
    return reader.error();
}

}  // namespace tessera

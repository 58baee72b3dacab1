#include "server/openai/chat_messages.h"

#include <algorithm>
#include <fmt/format.h>
#include <limits>
#include <utility>

namespace tessera {
namespace {

constexpr size_t kTextBytesMax = std::numeric_limits<size_t>::max();  // the body's own limit holds

bool name_character(char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_' ||
           c == '-' || c == '.';
}

// A function's name: what OpenAI allows, and dots.
void check_name(FieldReader& reader, const std::optional<std::string>& name, int32_t bytes_max) {
    if (!reader.ok()) {
        return;
    }
    if (!name || name->empty() || name->size() > static_cast<size_t>(bytes_max) ||
        !std::all_of(name->begin(), name->end(), name_character)) {
        reader.fail(
            "name",
            fmt::format("'{}' must have 1 to {} letters, digits, '_', '-' or '.'{}", reader.path("name"),
                        bytes_max, name ? fmt::format(", not be {}", describe(json::Value(*name))) : ""));
    }
}

void adopt(FieldReader& reader, const FieldReader& nested) {
    if (!nested.ok()) {
        reader.fail(*nested.error());
    }
}

// One element of a content array: a string, or an object of type text.
void check_part(FieldReader& message, const json::Value& part, size_t index) {
    if (part.is_string()) {
        return;
    }
    const std::string place = fmt::format("{}[{}]", message.path("content"), index);
    if (!part.is_object()) {
        message.fail(invalid_field(
            place, fmt::format("'{}' must be an object of type 'text', not {}", place, describe(part))));
        return;
    }
    FieldReader reader(part, place);
    const std::optional<std::string> type = reader.string("type", kTextBytesMax);
    if (reader.ok() && type != "text") {
        message.fail(
            invalid_field(place,
                          fmt::format("'{}' is of type {}; this model reads text only, so it must be 'text'",
                                      place, type ? describe(json::Value(*type)) : "nothing"),
                          type ? "unsupported_content" : ""));
        return;
    }
    if (!reader.string("text", kTextBytesMax)) {
        reader.fail("text", fmt::format("'{}' must be a string", reader.path("text")));
    }
    adopt(message, reader);
}

// The content as it is, when it is a string, null or an array of text parts.
void read_content(FieldReader& reader, bool required, json::Value& out) {
    const json::Value* content = reader.get("content");
    if (content == nullptr) {
        if (required) {
            reader.fail("content", fmt::format("'{}' must be a string or an array of text parts",
                                               reader.path("content")));
        }
        return;
    }
    if (!content->is_string() && !content->is_array()) {
        reader.fail("content", fmt::format("'{}' must be a string or an array of text parts, not {}",
                                           reader.path("content"), describe(*content)));
        return;
    }
    for (size_t i = 0; i < content->items().size(); ++i) {
        check_part(reader, content->items()[i], i);
    }
    out.set("content", *content);
}

// OpenAI's arguments are a JSON text; it must state an object.
void read_arguments(FieldReader& function, json::Value& out) {
    std::string text = function.string("arguments", kTextBytesMax).value_or("");
    if (text.empty()) {
        text = "{}";
    }
    const Result<json::Value> parsed = json::parse(text);
    if (!parsed.ok() || !parsed->is_object()) {
        function.fail(
            "arguments",
            fmt::format("'{}' must be a string that holds a JSON object{}", function.path("arguments"),
                        parsed.ok() ? "" : fmt::format(" ({})", parsed.status().message())));
        return;
    }
    out.set("arguments", std::move(text));
}

json::Value read_tool_call(FieldReader& message, const json::Value& call, const std::string& place) {
    json::Value out = json::Value::object();
    if (!call.is_object()) {
        message.fail(
            invalid_field(place, fmt::format("'{}' must be an object, not {}", place, describe(call))));
        return out;
    }
    FieldReader reader(call, place);
    if (auto id = reader.string("id", kTextBytesMax)) {
        out.set("id", std::move(*id));
    }
    if (reader.string("type", kTextBytesMax).value_or("function") != "function") {
        reader.fail("type", fmt::format("'{}' must be 'function'", reader.path("type")));
    }
    out.set("type", "function");
    const json::Value* function = reader.object("function");
    if (function == nullptr) {
        reader.fail("function",
                    fmt::format("'{}' must be an object with name and arguments", reader.path("function")));
        adopt(message, reader);
        return out;
    }
    FieldReader nested(*function, reader.path("function"));
    json::Value inner = json::Value::object();
    // History may name any function; the rules for names hold for the tools that are offered.
    std::string name = nested.string("name", kTextBytesMax).value_or("");
    if (name.empty()) {
        nested.fail("name", fmt::format("'{}' must be a string that is not empty", nested.path("name")));
    }
    inner.set("name", std::move(name));
    read_arguments(nested, inner);
    out.set("function", std::move(inner));
    adopt(reader, nested);
    adopt(message, reader);
    return out;
}

void read_assistant(FieldReader& reader, const OpenAiLimits& limits, json::Value& out) {
    read_content(reader, false, out);
    for (const std::string_view key : {"reasoning_content", "reasoning"}) {
        if (auto reasoning = reader.string(key, kTextBytesMax)) {
            out.set(std::string(key), std::move(*reasoning));
        }
    }
    if (reader.get("function_call") != nullptr) {
        reader.fail("function_call",
                    fmt::format("'{}' is not supported: use tool_calls", reader.path("function_call")),
                    "unsupported_parameter");
    }
    const json::Value* calls = reader.array("tool_calls", static_cast<size_t>(limits.tools_max));
    if (calls == nullptr) {
        return;
    }
    json::Value list = json::Value::array();
    for (size_t i = 0; i < calls->items().size() && reader.ok(); ++i) {
        list.push_back(
            read_tool_call(reader, calls->items()[i], fmt::format("{}[{}]", reader.path("tool_calls"), i)));
    }
    out.set("tool_calls", std::move(list));
}

json::Value read_message(FieldReader& reader, const OpenAiLimits& limits) {
    json::Value out = json::Value::object();
    const std::optional<std::string> role = reader.string("role", kTextBytesMax);
    if (role == "system" || role == "developer") {
        out.set("role", "system");
        read_content(reader, true, out);
    } else if (role == "user") {
        out.set("role", "user");
        read_content(reader, true, out);
    } else if (role == "assistant") {
        out.set("role", "assistant");
        read_assistant(reader, limits, out);
    } else if (role == "tool") {
        out.set("role", "tool");
        read_content(reader, true, out);
        if (auto id = reader.string("tool_call_id", kTextBytesMax)) {
            out.set("tool_call_id", std::move(*id));
        }
    } else {
        reader.fail("role", fmt::format("'{}' must be system, developer, user, assistant or tool{}",
                                        reader.path("role"),
                                        role ? fmt::format(", not {}", describe(json::Value(*role))) : ""));
    }
    reader.string("name", kTextBytesMax);  // a participant's name: the format has no place for it
    return out;
}

void check_tool(FieldReader& reader, const json::Value& tool, const std::string& place,
                const OpenAiLimits& limits) {
    if (!tool.is_object()) {
        reader.fail(
            invalid_field(place, fmt::format("'{}' must be an object, not {}", place, describe(tool))));
        return;
    }
    FieldReader outer(tool, place);
    const std::optional<std::string> type = outer.string("type", kTextBytesMax);
    if (outer.ok() && type != "function") {
        outer.fail("type", fmt::format("'{}' must be 'function'", outer.path("type")));
    }
    const json::Value* function = outer.object("function");
    if (function == nullptr) {
        outer.fail("function",
                   fmt::format("'{}' must be an object with at least a name", outer.path("function")));
        adopt(reader, outer);
        return;
    }
    FieldReader nested(*function, outer.path("function"));
    check_name(nested, nested.string("name", kTextBytesMax), limits.name_bytes_max);
    nested.string("description", kTextBytesMax);
    nested.object("parameters");
    nested.boolean("strict", false);
    adopt(outer, nested);
    adopt(reader, outer);
}

}  // namespace

json::Value read_messages(FieldReader& reader, const OpenAiLimits& limits) {
    json::Value out = json::Value::array();
    const json::Value* messages = reader.array("messages", static_cast<size_t>(limits.messages_max));
    if (messages == nullptr || messages->items().empty()) {
        reader.fail("messages", "'messages' must be an array of at least one message");
        return out;
    }
    for (size_t i = 0; i < messages->items().size() && reader.ok(); ++i) {
        const json::Value& message = messages->items()[i];
        const std::string place = fmt::format("{}[{}]", reader.path("messages"), i);
        if (!message.is_object()) {
            reader.fail(invalid_field(
                place, fmt::format("'{}' must be an object, not {}", place, describe(message))));
            break;
        }
        FieldReader nested(message, place);
        out.push_back(read_message(nested, limits));
        adopt(reader, nested);
    }
    return out;
}

const json::Value* read_tools(FieldReader& reader, const OpenAiLimits& limits) {
    const json::Value* tools = reader.array("tools", static_cast<size_t>(limits.tools_max));
    if (tools == nullptr || tools->items().empty()) {
        return nullptr;
    }
    for (size_t i = 0; i < tools->items().size() && reader.ok(); ++i) {
        check_tool(reader, tools->items()[i], fmt::format("{}[{}]", reader.path("tools"), i), limits);
    }
    return tools;
}

Result<json::Value> read_conversation(const json::Value& conversation) {
    FieldReader reader(conversation);
    json::Value messages = read_messages(reader, OpenAiLimits());
    read_tools(reader, OpenAiLimits());
    return reader.ok() ? Result(std::move(messages)) : invalid_argument(reader.error()->message);
}

}  // namespace tessera

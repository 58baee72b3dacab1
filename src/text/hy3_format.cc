#include "text/hy3_format.h"

#include <fmt/format.h>
#include <optional>
#include <vector>

namespace tessera {
namespace {

using json::Value;

struct Effort {
    static constexpr std::string_view kNoThink = "no_think";
    static constexpr std::string_view kLow = "low";
    static constexpr std::string_view kHigh = "high";
};
constexpr std::string_view kRetryStrategy = "reasoning_toolcall_retry";

// Truth as the template's language sees it: null, false, zero and what is empty are false.
bool truthy(const Value* value) {
    if (value == nullptr) {
        return false;
    }
    switch (value->type()) {
        case json::Type::kNull:
            return false;
        case json::Type::kBool:
            return value->as_bool();
        case json::Type::kInteger:
        case json::Type::kFloat:
            return value->as_double() != 0;
        case json::Type::kString:
            return !value->as_string().empty();
        case json::Type::kArray:
            return !value->items().empty();
        case json::Type::kObject:
            return !value->members().empty();
    }
    return false;
}

// A value inside running text, as the template's language prints it.
std::string printed(const Value& value) {
    if (value.is_string()) {
        return value.as_string();
    }
    if (value.is_null()) {
        return "None";
    }
    if (value.is_bool()) {
        return value.as_bool() ? "True" : "False";
    }
    return json::dump_python(value);
}

// What the kwargs come to.
struct Settings {
    std::string effort = std::string(Effort::kNoThink);
    bool generation_prompt = false;
    bool keep_reasoning = false;  // of every assistant message, not only those after the last user message
    bool training = false;
    bool raw_last_assistant = false;
};

Result<Settings> read_settings(const ChatInput& input) {
    Settings settings;
    if (const Value* effort = input.kwargs.find("reasoning_effort")) {
        settings.effort = printed(*effort);
        const bool known = settings.effort == Effort::kNoThink || settings.effort == Effort::kLow ||
                           settings.effort == Effort::kHigh;
        if (!effort->is_string() || !known) {
            return invalid_argument(
                fmt::format("reasoning_effort error : {}, should be no_think/low/high", settings.effort));
        }
    }
    settings.generation_prompt = truthy(input.kwargs.find("add_generation_prompt"));
    const Value* strategy = input.kwargs.find("fallback_strategy");
    if (strategy != nullptr && strategy->is_string() && strategy->as_string() == kRetryStrategy) {
        settings.effort = Effort::kHigh;
        settings.generation_prompt = false;
    }
    const Value* preserved = input.kwargs.find("preserved_thinking");
    settings.training = truthy(input.kwargs.find("is_training"));
    settings.keep_reasoning =
        settings.training ||
        (preserved != nullptr ? truthy(preserved) : input.tools && truthy(&*input.tools));
    settings.raw_last_assistant = truthy(input.kwargs.find("raw_last_assistant"));
    return settings;
}

std::string_view role_of(const Value& message) {
    const Value* role = message.find("role");
    return role != nullptr && role->is_string() ? std::string_view(role->as_string()) : std::string_view();
}

// Writes the prompt, message by message.
class Renderer {
  public:
    Renderer(const ChatInput& input, const Settings& settings, std::string_view suffix)
        : messages_(input.messages.items()), settings_(settings), suffix_(suffix), tokens_(suffix) {
        if (input.tools && truthy(&*input.tools)) {
            tools_ = &*input.tools;
        }
        for (size_t i = 0; i < messages_.size(); ++i) {
            if (role_of(messages_[i]) == "user") {
                last_user_ = static_cast<int64_t>(i);
            }
        }
    }

    Result<std::string> run() {
        Status status = put_head();
        for (size_t i = 0; i < messages_.size() && status.ok(); ++i) {
            status = put_message(i);
            if (!status.ok()) {
                status = Status(status.code(), fmt::format("messages[{}]{}", i, status.message()));
            }
        }
        if (!status.ok()) {
            return status;
        }
        close_tool_group();
        if (settings_.generation_prompt && (messages_.empty() || role_of(messages_.back()) != "assistant")) {
            put({tokens_.assistant, tokens_.think_begin});
            if (settings_.effort == Effort::kNoThink) {
                out_ += tokens_.think_end;
            }
        }
        return std::move(out_);
    }

  private:
    void put(std::initializer_list<std::string_view> pieces) {
        for (const std::string_view piece : pieces) {
            out_ += piece;
        }
    }

    // A content: a text, null, or a list of texts and of {"type": "text"} parts; other parts give nothing.
    Status put_content(const Value& message) {
        const Value* content = message.find("content");
        if (content == nullptr || content->is_null()) {
            return {};
        }
        if (content->is_string()) {
            out_ += content->as_string();
            return {};
        }
        if (!content->is_array()) {
            return invalid_argument(fmt::format(".content: must be a text, a list of parts or null, not {}",
                                                json::type_name(content->type())));
        }
        for (const Value& part : content->items()) {
            const Value* type = part.find("type");
            const Value* text = part.find("text");
            if (part.is_string()) {
                out_ += part.as_string();
            } else if (type != nullptr && type->is_string() && type->as_string() == "text" &&
                       text != nullptr && text->is_string()) {
                out_ += text->as_string();
            }
        }
        return {};
    }

    // All system messages, wherever they stand, then the tools and the reasoning mode.
    Status put_head() {
        out_ += tokens_.bos;
        for (size_t i = 0; i < messages_.size(); ++i) {
            if (role_of(messages_[i]) == "system") {
                if (Status status = put_content(messages_[i]); !status.ok()) {
                    return {status.code(), fmt::format("messages[{}]{}", i, status.message())};
                }
            }
        }
        if (tools_ != nullptr) {
            put_tools(out_.size() > tokens_.bos.size());
        }
        put({tokens_.reasoning_mode, "reasoning_effort:", settings_.effort});
        return {};
    }

    void put_tools(bool after_system) {
        put({after_system ? "\n\n" : "",
             "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
             "You are provided with function signatures within <tools></tools> XML tags:\n<tools>\n"});
        for (const Value& tool : tools_->items()) {
            put({json::dump_python(tool), "\n"});
        }
        put({"</tools>\n\nFor function call returns, you should first print ", tokens_.tool_calls_begin,
             "\nFor each function call, you should return object like:\n", tokens_.tool_call_begin,
             "{function-name}", tokens_.tool_sep, "\n"});
        for (const std::string_view number : {"1", "2"}) {
            put({tokens_.arg_key_begin, "{arg-key-", number, "}", tokens_.arg_key_end, "\n",
                 tokens_.arg_value_begin, "{arg-value-", number, "}", tokens_.arg_value_end, "\n"});
        }
        put({"...\n", tokens_.tool_call_end, "\nAt the end of function call returns, you should print ",
             tokens_.tool_calls_end});
    }

    Status put_message(size_t index) {
        const Value& message = messages_[index];
        const std::string_view role = role_of(message);
        if (role.empty()) {
            return invalid_argument(": must be an object with a \"role\"");
        }
        if (role == "user") {
            close_tool_group();
            out_ += tokens_.user;
            return put_content(message);
        }
        if (role == "assistant") {
            close_tool_group();
            return put_assistant(message, index);
        }
        return role == "tool" ? put_tool_result(message) : Status();
    }

    // The group is opened by its first result after a message with calls only, but closed after any result.
    Status put_tool_result(const Value& message) {
        if (!group_opened_) {
            put({"<tool_responses", suffix_, ">\n"});
        }
        group_opened_ = true;
        in_tool_group_ = true;
        put({"<tool_response", suffix_, ">\n"});
        if (Status status = put_content(message); !status.ok()) {
            return status;
        }
        put({"\n</tool_response", suffix_, ">\n"});
        return {};
    }

    void close_tool_group() {
        if (in_tool_group_) {
            put({"</tool_responses", suffix_, ">"});
        }
        in_tool_group_ = false;
    }

    std::string_view reasoning_of(const Value& message, size_t index) const {
        if (!settings_.keep_reasoning && static_cast<int64_t>(index) <= last_user_) {
            return {};
        }
        for (const std::string_view key : {"reasoning_content", "reasoning"}) {
            const Value* reasoning = message.find(key);
            if (reasoning != nullptr && reasoning->is_string()) {
                return reasoning->as_string();
            }
        }
        return {};
    }

    Status put_assistant(const Value& message, size_t index) {
        const bool last = index + 1 == messages_.size();
        const Value* calls = message.find("tool_calls");
        const bool has_calls = truthy(calls);
        const bool raw = last && settings_.raw_last_assistant && !has_calls;
        out_ += tokens_.assistant;
        if (!raw) {
            put({tokens_.think_begin, reasoning_of(message, index), tokens_.think_end});
        }
        if (Status status = put_content(message); !status.ok()) {
            return status;
        }
        if (has_calls) {
            group_opened_ = false;
            return put_calls(*calls);
        }
        // A last message without its end is what the model goes on with.
        if (!raw && (!last || settings_.training)) {
            out_ += tokens_.eos;
        }
        return {};
    }

    Status put_calls(const Value& calls) {
        if (!calls.is_array()) {
            return invalid_argument(".tool_calls: must be a list");
        }
        put({tokens_.tool_calls_begin, "\n"});
        for (size_t i = 0; i < calls.items().size(); ++i) {
            if (Status status = put_call(calls.items()[i]); !status.ok()) {
                return {status.code(), fmt::format(".tool_calls[{}].function{}", i, status.message())};
            }
        }
        put({tokens_.tool_calls_end, tokens_.eos});
        return {};
    }

    Status put_call(const Value& call) {
        const Value* function = call.find("function");
        const Value* name = function == nullptr ? nullptr : function->find("name");
        if (name == nullptr || !name->is_string()) {
            return invalid_argument(".name: must be a text");
        }
        const Value* given = function->find("arguments");
        Result<Value> arguments = given == nullptr ? Value() : *given;
        if (arguments->is_string()) {
            arguments = json::parse(given->as_string());
        }
        if (!arguments.ok() || !arguments->is_object()) {
            return invalid_argument(fmt::format(".arguments: must be a JSON object{}{}",
                                                arguments.ok() ? "" : ": ",
                                                arguments.ok() ? "" : arguments.status().message()));
        }
        put({tokens_.tool_call_begin, name->as_string(), tokens_.tool_sep, "\n"});
        for (const auto& [key, value] : arguments->members()) {
            put({tokens_.arg_key_begin, key, tokens_.arg_key_end, "\n", tokens_.arg_value_begin,
                 value.is_string() ? value.as_string() : json::dump_python(value), tokens_.arg_value_end,
                 "\n"});
        }
        put({tokens_.tool_call_end, "\n"});
        return {};
    }

    const std::vector<Value>& messages_;
    const Settings& settings_;
    const std::string_view suffix_;
    const Hy3Tokens tokens_;
    const Value* tools_ = nullptr;  // null: none
    int64_t last_user_ = -1;
    bool group_opened_ = false;   // a result came since the last message with calls
    bool in_tool_group_ = false;  // and no user or assistant message since
    std::string out_;
};

}  // namespace

Result<std::string> render_chat(const ChatInput& input, std::string_view suffix) {
    if (!input.messages.is_array()) {
        return invalid_argument("messages: must be a list");
    }
    if (input.tools && !input.tools->is_null() && !input.tools->is_array()) {
        return invalid_argument("tools: must be a list or null");
    }
    const Result<Settings> settings = read_settings(input);
    if (!settings.ok()) {
        return settings.status();
    }
    return Renderer(input, *settings, suffix).run();
}

Hy3Tokens::Hy3Tokens(std::string_view suffix) {
    const auto marker = [&](std::string_view name) { return fmt::format("<｜{}{}｜>", name, suffix); };
    const auto tag = [&](std::string_view name) { return fmt::format("<{}{}>", name, suffix); };
    bos = marker("hy_begin_of_sentence");
    eos = marker("hy_eos");
    user = marker("hy_User");
    assistant = marker("hy_Assistant");
    reasoning_mode = marker("reasoning_mode");
    think_begin = tag("think");
    think_end = tag("/think");
    tool_calls_begin = tag("tool_calls");
    tool_calls_end = tag("/tool_calls");
    tool_call_begin = tag("tool_call");
    tool_call_end = tag("/tool_call");
    tool_sep = tag("tool_sep");
    arg_key_begin = tag("arg_key");
    arg_key_end = tag("/arg_key");
    arg_value_begin = tag("arg_value");
    arg_value_end = tag("/arg_value");
}

OutputStart output_start(std::string_view prompt, std::string_view suffix) {
    const Hy3Tokens tokens(suffix);
    // What a user wrote in an earlier turn opens nothing.
    if (const size_t turn = prompt.rfind(tokens.assistant); turn != std::string_view::npos) {
        prompt.remove_prefix(turn);
    }
    const size_t begin = prompt.rfind(tokens.think_begin);
    const size_t end = prompt.rfind(tokens.think_end);
    const bool open = begin != std::string_view::npos && (end == std::string_view::npos || begin > end);
    return open ? OutputStart::kReasoning : OutputStart::kContent;
}

}  // namespace tessera

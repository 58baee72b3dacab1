// tessera render: conversations -> prompt text in the Hy3 format, a JSON object a line.
#include <string>

#include "cli.h"
#include "json_lines.h"
#include "subcommands.h"
#include "text/hy3_format.h"
#include "text/tokenizer.h"

namespace tessera {
namespace {

Result<json::Value> answer(const std::string& own_suffix, const json::Value& line) {
    const json::Value* messages = line.find("messages");
    const json::Value* tools = line.find("tools");
    const json::Value* kwargs = line.find("kwargs");
    const json::Value* suffix = line.find("suffix");
    if (messages == nullptr || (kwargs != nullptr && !kwargs->is_object()) ||
        (suffix != nullptr && !suffix->is_null() && !suffix->is_string())) {
        return invalid_argument(
            "the line must be {\"messages\": list, \"tools\": list or null, \"kwargs\": object, \"suffix\": "
            "text}, all "
            "but the messages optional");
    }
    ChatInput input{.messages = *messages, .tools = {}, .kwargs = json::Value::object()};
    if (tools != nullptr) {
        input.tools = *tools;
    }
    if (kwargs != nullptr) {
        input.kwargs = *kwargs;
    }
    Result<std::string> text =
        render_chat(input, suffix == nullptr || suffix->is_null() ? own_suffix : suffix->as_string());
    if (!text.ok()) {
        return text.status();
    }
    return json::Value::object({{"text", text.take()}});
}

}  // namespace

int run_render(int argc, char** argv) {
    std::string model;
    bool json = false;  // there is no other form
    CLI::App app(
        "Writes conversations as prompt text in the Hy3 format, a JSON object a line on standard input.");
    app.name("tessera render");
    app.add_option("MODEL", model, "model folder in Hugging Face layout")->required();
    app.add_flag("--json", json, "JSON lines on standard input and output (the only form)");
    app.footer(
        "A line {\"messages\": [...], \"tools\": [...], \"kwargs\": {...}, \"suffix\": \":opensource\"} "
        "gives\n"
        "{\"text\": ...} or {\"error\": ...}. kwargs are the template's variables (add_generation_prompt,\n"
        "reasoning_effort, ...): one that is absent is undefined, null is defined. The suffix of the "
        "structural\n"
        "tokens is the tokenizer's unless given.\n\nexample:\n"
        "  echo '{\"messages\": [{\"role\": \"user\", \"content\": \"Hi\"}], \"kwargs\": "
        "{\"add_generation_prompt\": "
        "true}}' |\n"
        "    tessera render models/demo --json");
    if (const std::optional<int> status = parse_arguments(app, argc, argv)) {
        return *status;
    }
    const Result<std::unique_ptr<Tokenizer>> tokenizer = Tokenizer::load(model);
    if (!tokenizer.ok()) {
        return fail(tokenizer.status());
    }
    const std::string& suffix = (*tokenizer)->token_suffix();
    return answer_json_lines([&](const json::Value& line) { return answer(suffix, line); }) ? 0 : 1;
}

}  // namespace tessera

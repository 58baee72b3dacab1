// tessera tokenize: text -> token ids and back, a JSON object a line.
#include <string>
#include <vector>

#include "cli.h"
#include "json_lines.h"
#include "subcommands.h"
#include "text/tokenizer.h"

namespace tessera {
namespace {

Result<json::Value> ids_of(const Tokenizer& tokenizer, const std::string& text) {
    const Result<std::vector<TokenId>> ids = tokenizer.encode(text);
    if (!ids.ok()) {
        return ids.status();
    }
    json::Value list = json::Value::array();
    for (const TokenId id : *ids) {
        list.push_back(id);
    }
    return json::Value::object({{"ids", std::move(list)}});
}

Result<json::Value> text_of(const Tokenizer& tokenizer, const json::Value& list) {
    std::vector<TokenId> ids;
    for (const json::Value& item : list.items()) {
        const std::optional<int64_t> id = item.as_int64();
        if (!id || *id < 0 || *id > INT32_MAX) {
            return invalid_argument("\"ids\" must be a list of token ids");
        }
        ids.push_back(static_cast<TokenId>(*id));
    }
    return json::Value::object(
        {{"text", tokenizer.decode(ids, false)}, {"text_skip_special", tokenizer.decode(ids, true)}});
}

Result<json::Value> answer(const Tokenizer& tokenizer, const json::Value& line) {
    const json::Value* text = line.find("text");
    const json::Value* ids = line.find("ids");
    if (text != nullptr && text->is_string() && ids == nullptr) {
        return ids_of(tokenizer, text->as_string());
    }
    if (ids != nullptr && ids->is_array() && text == nullptr) {
        return text_of(tokenizer, *ids);
    }
    return invalid_argument("the line must be {\"text\": text} or {\"ids\": list of token ids}");
}

}  // namespace

int run_tokenize(int argc, char** argv) {
    std::string model;
    bool json = false;  // there is no other form
    CLI::App app("Turns text into token ids and ids into text, a JSON object a line on standard input.");
    app.name("tessera tokenize");
    app.add_option("MODEL", model, "model folder in Hugging Face layout")->required();
    app.add_flag("--json", json, "JSON lines on standard input and output (the only form)");
    app.footer(
        "A line {\"text\": ...} gives {\"ids\": [...]}; added tokens in the text become their ids.\n"
        "A line {\"ids\": [...]} gives {\"text\": ..., \"text_skip_special\": ...}.\n\nexamples:\n"
        "  echo '{\"text\": \"Hello there\"}' | tessera tokenize models/demo --json\n"
        "  echo '{\"ids\": [2342, 11]}' | tessera tokenize models/demo --json");
    if (const std::optional<int> status = parse_arguments(app, argc, argv)) {
        return *status;
    }
    const Result<std::unique_ptr<Tokenizer>> tokenizer = Tokenizer::load(model);
    if (!tokenizer.ok()) {
        return fail(tokenizer.status());
    }
    return answer_json_lines([&](const json::Value& line) { return answer(**tokenizer, line); }) ? 0 : 1;
}

}  // namespace tessera

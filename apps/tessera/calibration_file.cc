#include "calibration_file.h"

#include <algorithm>
#include <fmt/format.h>

#include "base/json.h"
#include "prompt_file.h"
#include "server/openai_service.h"
#include "text/hy3_format.h"

namespace tessera {
namespace {

Result<std::vector<TokenId>> conversation_ids(const json::Value& line, const Tokenizer& tokenizer) {
    const json::Value* tools = line.find("tools");
    const json::Value* kwargs = line.find("kwargs");
    if (kwargs != nullptr && !kwargs->is_object()) {
        return invalid_argument("kwargs must be an object");
    }
    Result<json::Value> messages = read_conversation(line);  // the format itself drops what it does not know
    if (!messages.ok()) {
        return messages.status();
    }
    ChatInput input{.messages = messages.take(), .tools = {}, .kwargs = json::Value::object()};
    if (tools != nullptr) {
        input.tools = *tools;
    }
    if (kwargs != nullptr) {
        input.kwargs = *kwargs;
    }
    const Result<std::string> text = render_chat(input, tokenizer.token_suffix());
    return text.ok() ? tokenizer.encode(*text) : text.status();
}

Result<std::vector<TokenId>> sample_ids(const std::string& text, const Tokenizer& tokenizer,
                                        int64_t vocab_size) {
    const Result<json::Value> line = json::parse(text);
    if (!line.ok()) {
        return line.status();
    }
    const auto has = [&](const char* key) { return line->find(key) != nullptr ? 1 : 0; };
    if (has("messages") + has("ids") + has("text") > 1) {
        return invalid_argument("a line must have one of text, messages and ids, not several");
    }
    if (line->find("messages") != nullptr) {
        return conversation_ids(*line, tokenizer);
    }
    if (const json::Value* ids = line->find("ids"); ids != nullptr && ids->is_array()) {
        return token_ids(*ids, "ids", vocab_size);
    }
    if (const json::Value* plain = line->find("text"); plain != nullptr && plain->is_string()) {
        return tokenizer.encode(plain->as_string());
    }
    return invalid_argument(
        "a line must be {\"text\": TEXT}, {\"messages\": [...], \"tools\"?, \"kwargs\"?} or {\"ids\": "
        "[...]}");
}

}  // namespace

Result<std::vector<std::vector<TokenId>>> read_calibration(const std::string& path,
                                                           const Tokenizer& tokenizer, int64_t vocab_size,
                                                           const CalibrationLimits& limits) {
    const Result<std::vector<std::string>> lines = read_lines(path);
    if (!lines.ok()) {
        return lines.status();
    }
    std::vector<std::vector<TokenId>> samples;
    const auto samples_max = static_cast<size_t>(limits.samples_max);
    for (size_t i = 0; i < lines->size() && samples.size() < samples_max; ++i) {
        if (is_blank((*lines)[i])) {
            continue;
        }
        Result<std::vector<TokenId>> ids = sample_ids((*lines)[i], tokenizer, vocab_size);
        if (ids.ok() && ids->empty()) {
            ids = invalid_argument("the sample has no tokens");
        }
        if (ids.ok() && *std::ranges::max_element(*ids) >= vocab_size) {
            ids = invalid_argument(
                fmt::format("the tokenizer gives token {}, the model's vocabulary ends at {}",
                            *std::ranges::max_element(*ids), vocab_size - 1));
        }
        if (!ids.ok()) {
            return invalid_argument(fmt::format("{}: line {}: {}", path, i + 1, ids.status().message()));
        }
        ids->resize(std::min(ids->size(), static_cast<size_t>(limits.tokens_max)));
        samples.push_back(ids.take());
    }
    if (samples.empty()) {
        return invalid_argument(fmt::format("{}: has no samples; at least one line is needed", path));
    }
    return samples;
}

}  // namespace tessera

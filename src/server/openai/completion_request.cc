#include "server/openai/completion_request.h"

#include <fmt/format.h>
#include <utility>

namespace tessera {
namespace {

constexpr std::string_view kPromptForms =
    "a string, an array of token ids, or an array of such strings or arrays";

void fail_prompt(FieldReader& reader, const std::string& place, const json::Value& value) {
    reader.fail(
        invalid_field(place, fmt::format("'{}' must be {}, not {}", place, kPromptForms, describe(value))));
}

void read_prompt_list(FieldReader& reader, const json::Value& list, const OpenAiConfig& config,
                      std::vector<TextOrIds>& out) {
    if (list.items().size() > static_cast<size_t>(config.limits.prompts_max)) {
        reader.fail("prompt", fmt::format("'prompt' has {} prompts; at most {} are allowed",
                                          list.items().size(), config.limits.prompts_max));
        return;
    }
    const bool texts = list.items().front().is_string();
    for (size_t i = 0; i < list.items().size() && reader.ok(); ++i) {
        const json::Value& item = list.items()[i];
        const std::string place = fmt::format("prompt[{}]", i);
        if (texts ? !item.is_string() : !item.is_array()) {
            fail_prompt(reader, place, item);
        } else if (texts) {
            out.emplace_back(item.as_string());
        } else {
            out.emplace_back(read_token_ids(reader, item, place, config.vocab_size));
        }
    }
}

std::vector<TextOrIds> read_prompts(FieldReader& reader, const OpenAiConfig& config) {
    std::vector<TextOrIds> out;
    const json::Value* prompt = reader.get("prompt");
    if (prompt == nullptr) {
        reader.fail("prompt", fmt::format("'prompt' is missing; it must be {}", kPromptForms));
    } else if (prompt->is_string()) {
        out.emplace_back(prompt->as_string());
    } else if (!prompt->is_array() || prompt->items().empty()) {
        fail_prompt(reader, "prompt", *prompt);
    } else if (prompt->items().front().is_number()) {
        out.emplace_back(read_token_ids(reader, *prompt, "prompt", config.vocab_size));
    } else {
        read_prompt_list(reader, *prompt, config, out);
    }
    return out;
}

}  // namespace

std::optional<ApiError> parse_completion_request(const json::Value& body, const OpenAiConfig& config,
                                                 CompletionRequest& out) {
    FieldReader reader(body);
    out.common = read_common_fields(reader, config);
    out.prompts = read_prompts(reader, config);
    if (auto suffix = reader.string("suffix", SIZE_MAX); suffix && !suffix->empty()) {
        reader.fail("suffix", "'suffix' is not supported: this model does not fill in the middle",
                    "unsupported_parameter");
    }
    if (auto logprobs = reader.integer("logprobs", 0, kTopLogprobsMax)) {
        out.logprobs = static_cast<int32_t>(*logprobs);
    }
    const int64_t sequences = static_cast<int64_t>(out.prompts.size()) * out.common.n;
    if (sequences > config.limits.sequences_max) {
        reader.fail("n",
                    fmt::format("{} prompts times 'n' {} make {} sequences; at most {} are allowed",
                                out.prompts.size(), out.common.n, sequences, config.limits.sequences_max));
    }
    return reader.error();
}

}  // namespace tessera

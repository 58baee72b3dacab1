#include "load_dataset.h"

#include <algorithm>
#include <array>
#include <fmt/format.h>
#include <random>

#include "base/json.h"
#include "prompt_file.h"

namespace tessera {
namespace {

constexpr int64_t kTokensMax = int64_t{1} << 24;
constexpr size_t kPromptsMax = 1'000'000;

// Short common words: a token each, with the space before them, in a large vocabulary.
constexpr std::array<std::string_view, 32> kWords = {
    "time", "way",  "day",  "man",  "thing", "life",  "child", "world", "hand", "part", "place",
    "case", "week", "work", "fact", "group", "night", "point", "home",  "room", "area", "money",
    "book", "word", "side", "kind", "head",  "house", "page",  "power", "hour", "line"};

template <typename Put>
void for_each_token(const LoadPrompt& prompt, uint64_t choices, Put put) {
    for (const PromptSegment& segment : prompt.segments) {
        std::mt19937_64 random(segment.seed);
        for (int64_t i = 0; i < segment.tokens; ++i) {
            put(random() % choices);
        }
    }
}

Status line_error(const FileSpec& spec, size_t line, std::string_view what) {
    return invalid_argument(fmt::format("{}: line {}: {}", spec.path, line + 1, what));
}

// A member that must be an integer in [0, kTokensMax].
Result<int64_t> count_member(const json::Value& object, std::string_view key) {
    const json::Value* value = object.find(key);
    const std::optional<int64_t> number = value == nullptr ? std::nullopt : value->as_int64();
    if (!number || *number < 0 || *number > kTokensMax) {
        return invalid_argument(fmt::format("{} must be an integer from 0 to {}", key, kTokensMax));
    }
    return *number;
}

// The last hash id stands for what is left of input_length, which may be less than a block.
Result<LoadPrompt> mooncake_prompt(const json::Value& line, const FileSpec& spec) {
    const Result<int64_t> input = count_member(line, "input_length");
    const Result<int64_t> output = count_member(line, "output_length");
    const json::Value* timestamp = line.find("timestamp");
    const json::Value* hashes = line.find("hash_ids");
    if (!input.ok() || !output.ok()) {
        return input.ok() ? output.status() : input.status();
    }
    if (timestamp == nullptr || !timestamp->is_number() || timestamp->as_double() < 0) {
        return invalid_argument("timestamp must be a number of milliseconds");
    }
    if (hashes == nullptr || !hashes->is_array()) {
        return invalid_argument("hash_ids must be a list of integers");
    }
    LoadPrompt prompt;
    prompt.output_tokens = std::max<int64_t>(1, *output);
    prompt.arrival =
        static_cast<TimeNs>(timestamp->as_double() / spec.speedup * static_cast<double>(kNsPerMs));
    int64_t left = *input;
    for (const json::Value& hash : hashes->items()) {
        const std::optional<int64_t> id = hash.as_int64();
        if (!id) {
            return invalid_argument("hash_ids must be a list of integers");
        }
        const int64_t tokens = std::min(left, spec.block_tokens);
        prompt.segments.push_back({static_cast<uint64_t>(*id) + 1, tokens});
        left -= tokens;
    }
    if (left > 0) {
        return invalid_argument(fmt::format("its {} hash_ids of {} tokens do not cover input_length {}",
                                            hashes->items().size(), spec.block_tokens, *input));
    }
    return prompt;
}

Result<LoadPrompt> custom_prompt(const json::Value& line, const FileSpec& spec) {
    const json::Value* text = line.find("prompt");
    if (text == nullptr || !text->is_string() || text->as_string().empty()) {
        return invalid_argument("prompt must be a non-empty string");
    }
    LoadPrompt prompt;
    prompt.text = text->as_string();
    prompt.output_tokens = spec.output_tokens;
    if (line.find("output_tokens") != nullptr) {
        const Result<int64_t> output = count_member(line, "output_tokens");
        if (!output.ok()) {
            return output.status();
        }
        prompt.output_tokens = std::max<int64_t>(1, *output);
    }
    return prompt;
}

Result<std::vector<LoadPrompt>> read_prompts(const FileSpec& spec,
                                             Result<LoadPrompt> (*read)(const json::Value&,
                                                                        const FileSpec&)) {
    const Result<std::vector<std::string>> lines = read_lines(spec.path);
    if (!lines.ok()) {
        return lines.status();
    }
    std::vector<LoadPrompt> prompts;
    const size_t limit = spec.count == 0 ? kPromptsMax : spec.count;
    for (size_t i = 0; i < lines->size() && prompts.size() < limit; ++i) {
        if (is_blank((*lines)[i])) {
            continue;
        }
        const Result<json::Value> line = json::parse((*lines)[i]);
        if (!line.ok()) {
            return line_error(spec, i, line.status().message());
        }
        Result<LoadPrompt> prompt = read(*line, spec);
        if (!prompt.ok()) {
            return line_error(spec, i, prompt.status().message());
        }
        prompts.push_back(prompt.take());
    }
    if (prompts.empty()) {
        return invalid_argument(fmt::format("{}: holds no prompts", spec.path));
    }
    return prompts;
}

}  // namespace

std::vector<LoadPrompt> random_prompts(const RandomSpec& spec) {
    std::mt19937_64 random(spec.seed);
    const uint64_t prefix_seed = random();
    std::vector<LoadPrompt> prompts(spec.count);
    for (LoadPrompt& prompt : prompts) {
        prompt.segments = {{prefix_seed, spec.prefix_tokens}, {random(), spec.input_tokens}};
        prompt.output_tokens = spec.output_tokens;
    }
    return prompts;
}

Result<std::vector<LoadPrompt>> mooncake_prompts(const FileSpec& spec) {
    Result<std::vector<LoadPrompt>> prompts = read_prompts(spec, mooncake_prompt);
    if (prompts.ok()) {
        std::ranges::stable_sort(*prompts, {}, &LoadPrompt::arrival);
        const TimeNs first = prompts->front().arrival;
        for (LoadPrompt& prompt : *prompts) {
            prompt.arrival -= first;
        }
    }
    return prompts;
}

Result<std::vector<LoadPrompt>> custom_prompts(const FileSpec& spec) {
    return read_prompts(spec, custom_prompt);
}

std::string prompt_ids_json(const LoadPrompt& prompt, IdRange ids) {
    std::string out = "[";
    for_each_token(prompt, static_cast<uint64_t>(ids.end - ids.first), [&](uint64_t choice) {
        fmt::format_to(std::back_inserter(out), "{}{}", out.size() > 1 ? "," : "",
                       ids.first + static_cast<int64_t>(choice));
    });
    return out + "]";
}

std::string prompt_words(const LoadPrompt& prompt) {
    std::string out;
    for_each_token(prompt, kWords.size(), [&](uint64_t choice) {
        if (!out.empty()) {
            out += ' ';
        }
        out += kWords[choice];
    });
    return out;
}

}  // namespace tessera

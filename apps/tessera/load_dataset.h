// What a load test sends: prompts and output lengths, made from a seed or read from a file.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/status.h"

namespace tessera {

// A run of prompt tokens that depends on its seed alone: equal seeds give equal tokens, so that requests
// share prefixes exactly where their first segments agree.
struct PromptSegment {
    uint64_t seed = 0;
    int64_t tokens = 0;
};

struct LoadPrompt {
    std::vector<PromptSegment> segments;  // or
    std::string text;                     // a prompt of its own
    int64_t output_tokens = 0;
    TimeNs arrival = -1;  // of a trace; -1: the request rate decides
};

struct RandomSpec {
    size_t count = 0;
    int64_t prefix_tokens = 0;  // shared by all prompts, before the random part
    int64_t input_tokens = 0;
    int64_t output_tokens = 0;
    uint64_t seed = 0;
};

struct FileSpec {
    std::string path;             // .jsonl or .jsonl.gz
    size_t count = 0;             // at most so many prompts; 0 = all
    int64_t output_tokens = 128;  // of a line that does not say (custom)
    int64_t block_tokens = 512;   // of one hash id (mooncake)
    double speedup = 1;           // arrivals are divided by it (mooncake)
};

std::vector<LoadPrompt> random_prompts(const RandomSpec& spec);
// Lines {"timestamp" ms, "input_length", "output_length", "hash_ids"}.
Result<std::vector<LoadPrompt>> mooncake_prompts(const FileSpec& spec);
// Lines {"prompt", "output_tokens"?}.
Result<std::vector<LoadPrompt>> custom_prompts(const FileSpec& spec);

// Token ids in [id_first, id_end), as a JSON list: what the completions endpoint takes as a prompt.
struct IdRange {
    int64_t first = 0;
    int64_t end = 0;
};
std::string prompt_ids_json(const LoadPrompt& prompt, IdRange ids);
// The same as text, about a token a word, for the chat endpoint.
std::string prompt_words(const LoadPrompt& prompt);

}  // namespace tessera

// The fields that chat and text completions share: model, sampling, limits, streaming.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "server/openai/fields.h"
#include "server/openai_service.h"
#include "types/sampling_params.h"

namespace tessera {

struct CommonFields {
    SamplingParams sampling;                           // but max_tokens, seed, logprobs and forced
    std::optional<int32_t> max_tokens;                 // absent: the rest of the context
    std::string_view max_tokens_field = "max_tokens";  // which of its two names the client used
    std::optional<int64_t> seed;
    int32_t n = 1;
    std::vector<std::string> stop;
    bool include_stop = false;
    bool skip_special = true;
    bool stream = false;
    bool include_usage = false;
    bool continuous_usage = false;
    bool return_token_ids = false;
    int32_t priority = 0;
    std::string cache_salt;  // empty: by policy
    std::string request_id;  // empty: the HTTP request's
};

CommonFields read_common_fields(FieldReader& reader, const OpenAiConfig& config);
// Fails with 404 model_not_found unless `model` is absent or served.
void check_model(FieldReader& reader, const OpenAiConfig& config);

// A field that the API knows and this server does not offer: anything but null (or the values that mean
// "off") is a 400.
struct UnsupportedField {
    std::string_view name;
    std::string_view why;
};
void reject_unsupported(FieldReader& reader, const UnsupportedField& field);

}  // namespace tessera

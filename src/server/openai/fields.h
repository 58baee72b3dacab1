// FieldReader: typed, bounded reading of a JSON object's members. The first field that is wrong is kept as
// the error; readers return the fallback from then on, so that a parser reads all its fields and checks once.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/json.h"
#include "server/openai/error.h"
#include "types/model_config.h"

namespace tessera {

struct NumberRange {
    double min = 0;
    double max = 0;
    bool min_excluded = false;
};

// A null member counts as absent everywhere: clients send null for what they leave open.
class FieldReader {
  public:
    // path: where the object stands in the body ("" = the body itself, "messages[0]", ...). The object must
    // outlive the reader.
    explicit FieldReader(const json::Value& object, std::string path = {})
        : object_(object), path_(std::move(path)) {}

    bool boolean(std::string_view key, bool fallback);
    std::optional<int64_t> integer(std::string_view key, int64_t min, int64_t max);
    std::optional<double> number(std::string_view key, NumberRange range);
    std::optional<std::string> string(std::string_view key, size_t bytes_max);
    const json::Value* array(std::string_view key, size_t items_max);
    const json::Value* object(std::string_view key);
    // An array of token ids, each in [0, vocab_size).
    std::vector<TokenId> token_ids(std::string_view key, int32_t vocab_size, size_t items_max);

    const json::Value* get(std::string_view key) const;  // null when absent or null
    std::string path(std::string_view key) const;        // the member's full path
    // Keeps the first error only.
    void fail(std::string_view key, std::string message, std::string code = {});
    void fail(ApiError error);
    bool ok() const { return !error_.has_value(); }
    const std::optional<ApiError>& error() const { return error_; }

  private:
    void fail_type(std::string_view key, std::string_view expected, const json::Value& value);

    const json::Value& object_;
    const std::string path_;
    std::optional<ApiError> error_;
};

// The ids of a JSON array; fails on `reader` with `path` when one is no id in [0, vocab_size).
std::vector<TokenId> read_token_ids(FieldReader& reader, const json::Value& array, const std::string& path,
                                    int32_t vocab_size);
// The integer that a JSON number states, 3.0 included; none when it is none or does not fit.
std::optional<int64_t> integral_value(const json::Value& value);
// A short description for messages: `"text"`, `12`, `an array`, ...
std::string describe(const json::Value& value);

}  // namespace tessera

#include "server/openai/fields.h"

#include <cmath>
#include <fmt/format.h>
#include <utility>

namespace tessera {
namespace {

constexpr size_t kDescribedBytesMax = 40;
constexpr double kExactIntegersBelow = 9007199254740992.0;  // 2^53

}  // namespace

std::string describe(const json::Value& value) {
    switch (value.type()) {
        case json::Type::kArray:
            return value.items().empty() ? "an empty array" : "an array";
        case json::Type::kObject:
            return "an object";
        case json::Type::kString: {
            if (value.as_string().size() > kDescribedBytesMax) {
                return fmt::format("a string of {} bytes", value.as_string().size());
            }
            return json::dump(value);
        }
        default:
            break;
    }
    const std::string text = json::dump(value);
    return text.size() > kDescribedBytesMax ? fmt::format("a number of {} digits", text.size()) : text;
}

std::optional<int64_t> integral_value(const json::Value& value) {
    if (value.is_integer()) {
        return value.as_int64();
    }
    if (!value.is_number()) {
        return std::nullopt;
    }
    const double number = value.as_double();
    if (!(std::abs(number) <= kExactIntegersBelow) || number != std::floor(number)) {
        return std::nullopt;
    }
    return static_cast<int64_t>(number);
}

std::string FieldReader::path(std::string_view key) const {
    return path_.empty() ? std::string(key) : fmt::format("{}.{}", path_, key);
}

const json::Value* FieldReader::get(std::string_view key) const {
    const json::Value* value = object_.find(key);
    return value == nullptr || value->is_null() ? nullptr : value;
}

void FieldReader::fail(ApiError error) {
    if (!error_) {
        error_ = std::move(error);
    }
}

void FieldReader::fail(std::string_view key, std::string message, std::string code) {
    fail(invalid_field(path(key), std::move(message), std::move(code)));
}

void FieldReader::fail_type(std::string_view key, std::string_view expected, const json::Value& value) {
    fail(key, fmt::format("'{}' must be {}, not {}", path(key), expected, describe(value)));
}

bool FieldReader::boolean(std::string_view key, bool fallback) {
    const json::Value* value = get(key);
    if (value == nullptr) {
        return fallback;
    }
    if (!value->is_bool()) {
        fail_type(key, "true or false", *value);
        return fallback;
    }
    return value->as_bool();
}

std::optional<int64_t> FieldReader::integer(std::string_view key, int64_t min, int64_t max) {
    const json::Value* value = get(key);
    if (value == nullptr) {
        return std::nullopt;
    }
    const std::optional<int64_t> number = integral_value(*value);
    if (!number || *number < min || *number > max) {
        fail_type(key, fmt::format("an integer from {} to {}", min, max), *value);
        return std::nullopt;
    }
    return number;
}

std::optional<double> FieldReader::number(std::string_view key, NumberRange range) {
    const json::Value* value = get(key);
    if (value == nullptr) {
        return std::nullopt;
    }
    const double number = value->is_number() ? value->as_double() : std::nan("");
    const bool above = range.min_excluded ? number > range.min : number >= range.min;
    if (!above || !(number <= range.max)) {  // a NaN fails both
        const std::string_view from = range.min_excluded ? "above" : "from";
        const std::string_view to = range.min_excluded ? "up to" : "to";
        fail_type(key, fmt::format("a number {} {} {} {}", from, range.min, to, range.max), *value);
        return std::nullopt;
    }
    return number;
}

std::optional<std::string> FieldReader::string(std::string_view key, size_t bytes_max) {
    const json::Value* value = get(key);
    if (value == nullptr) {
        return std::nullopt;
    }
    if (!value->is_string()) {
        fail_type(key, "a string", *value);
        return std::nullopt;
    }
    if (value->as_string().size() > bytes_max) {
        fail_type(key, fmt::format("a string of at most {} bytes", bytes_max), *value);
        return std::nullopt;
    }
    return value->as_string();
}

const json::Value* FieldReader::array(std::string_view key, size_t items_max) {
    const json::Value* value = get(key);
    if (value == nullptr) {
        return nullptr;
    }
    if (!value->is_array()) {
        fail_type(key, "an array", *value);
        return nullptr;
    }
    if (value->items().size() > items_max) {
        fail(key, fmt::format("'{}' has {} items; at most {} are allowed", path(key), value->items().size(),
                              items_max));
        return nullptr;
    }
    return value;
}

const json::Value* FieldReader::object(std::string_view key) {
    const json::Value* value = get(key);
    if (value != nullptr && !value->is_object()) {
        fail_type(key, "an object", *value);
        return nullptr;
    }
    return value;
}

std::vector<TokenId> FieldReader::token_ids(std::string_view key, int32_t vocab_size, size_t items_max) {
    const json::Value* ids = array(key, items_max);
    return ids == nullptr ? std::vector<TokenId>{} : read_token_ids(*this, *ids, path(key), vocab_size);
}

std::vector<TokenId> read_token_ids(FieldReader& reader, const json::Value& array, const std::string& path,
                                    int32_t vocab_size) {
    std::vector<TokenId> ids;
    ids.reserve(array.items().size());
    for (const json::Value& item : array.items()) {
        const std::optional<int64_t> id = integral_value(item);
        if (!id || *id < 0 || *id >= vocab_size) {
            const std::string place = fmt::format("{}[{}]", path, ids.size());
            reader.fail(invalid_field(place, fmt::format("'{}' must be a token id from 0 to {}, not {}",
                                                         place, vocab_size - 1, describe(item))));
            return {};
        }
        ids.push_back(static_cast<TokenId>(*id));
    }
    return ids;
}

}  // namespace tessera

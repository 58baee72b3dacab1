#include "weights/config/field_reader.h"

#include <cmath>
#include <fmt/format.h>

namespace tessera {
namespace {

constexpr size_t kValueCharsMax = 60;  // of a wrong value repeated in a message

std::string shortened(const json::Value& value) {
    std::string text = json::dump(value);
    if (text.size() > kValueCharsMax) {
        text = fmt::format("of type {}", json::type_name(value.type()));
    }
    return text;
}

}  // namespace

std::optional<int64_t> integer_in(const json::Value& value, IntegerRange range) {
    const std::optional<int64_t> number = value.as_int64();
    if (!number || *number < range.min || *number > range.max) {
        return std::nullopt;
    }
    return number;
}

std::optional<double> number_in(const json::Value& value, NumberRange range) {
    if (!value.is_number()) {
        return std::nullopt;
    }
    const double number = value.as_double();
    const bool above = range.min_included ? number >= range.min : number > range.min;
    if (!std::isfinite(number) || !above || number > range.max) {
        return std::nullopt;
    }
    return number;
}

std::string describe(IntegerRange range) {
    return fmt::format("an integer from {} to {}", range.min, range.max);
}

std::string describe(NumberRange range) {
    return fmt::format("a number {} {} and at most {}", range.min_included ? "of at least" : "above",
                       range.min, range.max);
}

const json::Value* FieldReader::find(std::string_view key) const {
    const json::Value* value = object_.find(key);
    return value == nullptr || value->is_null() ? nullptr : value;
}

FieldReader::Found FieldReader::required(Keys keys) {
    Found found;
    for (std::string_view key : keys) {
        const json::Value* value = find(key);
        if (value == nullptr) {
            continue;
        }
        if (found.value == nullptr) {
            found = {key, value};
        } else if (json::dump(*value) != json::dump(*found.value)) {
            fail(invalid_argument(
                fmt::format("{}: {} is {} but {} is {}; they name the same thing and must agree", file_,
                            found.key, shortened(*found.value), key, shortened(*value))));
        }
    }
    if (found.value == nullptr) {
        std::string names;
        for (std::string_view key : keys) {
            names += names.empty() ? std::string(key) : fmt::format(" (or {})", key);
        }
        fail(invalid_argument(fmt::format("{}: {} is missing; it must be stated", file_, names)));
    }
    return found;
}

int64_t FieldReader::integer(Keys keys, IntegerRange range) {
    const Found found = required(keys);
    if (found.value == nullptr) {
        return range.min;
    }
    const std::optional<int64_t> number = integer_in(*found.value, range);
    if (!number) {
        fail_value(found.key, *found.value, describe(range));
    }
    return number.value_or(range.min);
}

bool FieldReader::boolean(Keys keys) {
    const Found found = required(keys);
    if (found.value == nullptr) {
        return false;
    }
    if (!found.value->is_bool()) {
        fail_value(found.key, *found.value, "true or false");
        return false;
    }
    return found.value->as_bool();
}

double FieldReader::number(Keys keys, NumberRange range) {
    const Found found = required(keys);
    if (found.value == nullptr) {
        return range.max;
    }
    const std::optional<double> number = number_in(*found.value, range);
    if (!number) {
        fail_value(found.key, *found.value, describe(range));
    }
    return number.value_or(range.max);
}

std::string FieldReader::text(Keys keys) {
    const Found found = required(keys);
    if (found.value == nullptr) {
        return {};
    }
    if (!found.value->is_string()) {
        fail_value(found.key, *found.value, "a string");
        return {};
    }
    return found.value->as_string();
}

void FieldReader::fail_value(std::string_view key, const json::Value& value, std::string_view right) {
    fail(invalid_argument(fmt::format("{}: {} is {}; it must be {}", file_, key, shortened(value), right)));
}

void FieldReader::fail(Status status) {
    if (status_.ok()) {
        status_ = std::move(status);
    }
}

}  // namespace tessera

// FieldReader: reads the members of one JSON object and remembers the first thing that was wrong, so that a
// long list of fields can be read in a row and checked once at the end.
#pragma once

#include <initializer_list>
#include <string>
#include <string_view>

#include "base/json.h"
#include "base/status.h"

namespace tessera {

struct IntegerRange {
    int64_t min = 0;
    int64_t max = 0;
};

struct NumberRange {
    double min = 0;
    double max = 0;
    bool min_included = true;
};

class FieldReader {
  public:
    // Several spellings of one field; where more than one is present they must agree.
    using Keys = std::initializer_list<std::string_view>;

    // `file` begins every message. `object` must outlive the reader.
    FieldReader(const json::Value& object, std::string file) : object_(object), file_(std::move(file)) {}

    // Each returns a harmless value when the field is missing or wrong; status() then says why.
    int64_t integer(Keys keys, IntegerRange range);
    bool boolean(Keys keys);
    double number(Keys keys, NumberRange range);
    std::string text(Keys keys);
    // The member, or null when it is absent or JSON null.
    const json::Value* find(std::string_view key) const;

    // value as it stands in the message: FILE: KEY is VALUE; it must be RIGHT.
    void fail_value(std::string_view key, const json::Value& value, std::string_view right);
    void fail(Status status);
    const Status& status() const { return status_; }
    const std::string& file() const { return file_; }

  private:
    struct Found {
        std::string_view key;
        const json::Value* value = nullptr;
    };
    Found required(Keys keys);

    const json::Value& object_;
    std::string file_;
    Status status_;
};

// One integer or number that is already at hand; null and a message in `reader` when it is out of place.
std::optional<int64_t> integer_in(const json::Value& value, IntegerRange range);
std::optional<double> number_in(const json::Value& value, NumberRange range);
std::string describe(IntegerRange range);
std::string describe(NumberRange range);

}  // namespace tessera

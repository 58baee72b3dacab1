// A JSON document as a plain value, its strict parser and its writers. The parser rejects what no honest
// client sends (NaN, comments, lone surrogates, invalid UTF-8, over-deep nesting) with the place of the
// error; the writers give the two spellings that we need: compact, and Python's json.dumps (", " and ": ").
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "base/status.h"

namespace tessera::json {

enum class Type { kNull, kBool, kInteger, kFloat, kString, kArray, kObject };

std::string_view type_name(Type type);  // "null", "boolean", "integer", "number", "string", "array", "object"

class Value;
using Member = std::pair<std::string, Value>;

// An object keeps the order of its keys; a repeated key keeps its first place and its last value (as Python's
// dict does). An integer that does not fit int64 stays exact as its digits (see number_text()).
class Value {
  public:
    Value() = default;
    Value(std::nullptr_t) {}
    Value(bool value) : type_(Type::kBool), integer_(value) {}
    Value(int value) : type_(Type::kInteger), integer_(value) {}
    Value(int64_t value) : type_(Type::kInteger), integer_(value) {}
    Value(uint64_t value);
    Value(double value) : type_(Type::kFloat), float_(value) {}
    Value(const char* value) : type_(Type::kString), string_(value) {}
    Value(std::string_view value) : type_(Type::kString), string_(value) {}
    Value(std::string value) : type_(Type::kString), string_(std::move(value)) {}
    static Value array(std::vector<Value> items = {});
    static Value object(std::vector<Member> members = {});
    // An integer of any size from its decimal digits.
    static Value big_integer(std::string digits);

    Type type() const { return type_; }
    bool is_null() const { return type_ == Type::kNull; }
    bool is_bool() const { return type_ == Type::kBool; }
    bool is_integer() const { return type_ == Type::kInteger; }
    bool is_number() const { return type_ == Type::kInteger || type_ == Type::kFloat; }
    bool is_string() const { return type_ == Type::kString; }
    bool is_array() const { return type_ == Type::kArray; }
    bool is_object() const { return type_ == Type::kObject; }

    bool as_bool() const { return integer_ != 0; }              // REQUIRES: is_bool()
    std::optional<int64_t> as_int64() const;                    // none unless an integer that fits
    double as_double() const;                                   // REQUIRES: is_number()
    const std::string& as_string() const { return string_; }    // REQUIRES: is_string()
    std::string take_string() { return std::move(string_); }    // REQUIRES: is_string()
    const std::vector<Value>& items() const { return items_; }  // empty unless an array
    std::vector<Value>& items() { return items_; }
    const std::vector<Member>& members() const { return members_; }  // empty unless an object
    // The member's value, or null when there is no such member (or this is no object).
    const Value* find(std::string_view key) const;
    // Appends, or replaces the value of an existing key in its place.
    void set(std::string key, Value value);
    void push_back(Value value) { items_.push_back(std::move(value)); }

    // The digits of an integer too large for int64, else empty.
    const std::string& big_digits() const { return string_; }

  private:
    Type type_ = Type::kNull;
    int64_t integer_ = 0;
    double float_ = 0;
    std::string string_;
    std::vector<Value> items_;
    std::vector<Member> members_;
};

struct ParseLimits {
    int depth_max = 64;
    size_t bytes_max = size_t{1} << 30;
};

// Parses exactly one document. The error names the byte offset and what was expected.
Result<Value> parse(std::string_view text, const ParseLimits& limits = {});

// No spaces; non-ASCII characters as they are. Floats in the shortest form that reads back as the same float
// (8.0, not 8); a float that is not finite becomes null.
std::string dump(const Value& value);
// As Python's json.dumps(value, ensure_ascii=False): ", " and ": ", floats as repr() prints them.
std::string dump_python(const Value& value);
// Appends text as a JSON string with its quotes; invalid UTF-8 becomes U+FFFD.
void append_string(std::string& out, std::string_view text);
// Appends a double as Python's repr() would (1e-05, 100000.0, 1e+16).
void append_python_float(std::string& out, double value);

}  // namespace tessera::json

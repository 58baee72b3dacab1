#include "base/json.h"

#include <charconv>
#include <cmath>
#include <fmt/format.h>
#include <nlohmann/json.hpp>
#include <unordered_map>

#include "base/utf8.h"

namespace tessera::json {
namespace {

// The parser's messages quote the whole of the last token, which may be megabytes of a stranger's text. Both
// ends say what is wrong; cuts fall between characters.
std::string shortened(std::string_view message) {
    constexpr size_t kHeadBytes = 160;
    constexpr size_t kTailBytes = 80;
    if (message.size() <= kHeadBytes + kTailBytes) {
        return std::string(message);
    }
    const auto inside = [&](size_t at) { return (static_cast<unsigned char>(message[at]) & 0xC0) == 0x80; };
    size_t head = kHeadBytes;
    while (head > 0 && inside(head)) {
        --head;
    }
    size_t tail = message.size() - kTailBytes;
    while (tail < message.size() && inside(tail)) {
        ++tail;
    }
    return fmt::format("{} [...] {}", message.substr(0, head), message.substr(tail));
}

// Receives nlohmann's events and builds the Value. Objects find repeated keys by a linear scan while they are
// small and through an index once they grow, so that a hostile object of many keys stays linear.
class Builder {
  public:
    Builder(Value& root, int depth_max) : root_(root), depth_max_(depth_max) {}

    bool null() { return put(Value()); }
    bool boolean(bool value) { return put(Value(value)); }
    bool number_integer(int64_t value) { return put(Value(value)); }
    bool number_unsigned(uint64_t value) { return put(Value(value)); }
    bool number_float(double value, const std::string& text) {
        if (text.find_first_of(".eE") == std::string::npos) {
            return put(Value::big_integer(text));
        }
        return put(Value(value));
    }
    bool string(std::string& value) { return put(Value(std::move(value))); }
    bool binary(std::vector<uint8_t>&) { return false; }
    bool start_object(size_t) { return open(Value::object()); }
    bool start_array(size_t) { return open(Value::array()); }
    bool end_object() { return close(); }
    bool end_array() { return close(); }
    bool key(std::string& value) {
        stack_.back().key = std::move(value);
        return true;
    }
    bool parse_error(size_t position, const std::string&, const nlohmann::detail::exception& error) {
        const std::string_view what = error.what();
        size_t start = what.find("syntax error");
        if (start == std::string_view::npos) {
            start = what.starts_with('[') ? what.find(' ') + 1 : 0;  // past "[json.exception...] "
        }
        error_ = fmt::format("invalid JSON at byte {}: {}", position, shortened(what.substr(start)));
        return false;
    }

    const std::string& error() const { return error_; }

  private:
    static constexpr size_t kIndexFrom = 16;

    struct Frame {
        Value value;
        std::string key;
        std::unordered_map<std::string, size_t> index;  // used from kIndexFrom members on
    };

    bool open(Value value) {
        if (static_cast<int>(stack_.size()) >= depth_max_) {
            error_ = fmt::format("JSON nested deeper than {} levels", depth_max_);
            return false;
        }
        stack_.push_back({std::move(value), {}, {}});
        return true;
    }

    bool close() {
        Value done = std::move(stack_.back().value);
        stack_.pop_back();
        return put(std::move(done));
    }

    bool put(Value value) {
        if (stack_.empty()) {
            root_ = std::move(value);
            return true;
        }
        Frame& top = stack_.back();
        if (top.value.is_array()) {
            top.value.push_back(std::move(value));
            return true;
        }
        put_member(top, std::move(value));
        return true;
    }

    static void put_member(Frame& frame, Value value) {
        auto& members = const_cast<std::vector<Member>&>(frame.value.members());
        if (members.size() < kIndexFrom) {
            frame.value.set(std::move(frame.key), std::move(value));
            return;
        }
        if (frame.index.empty()) {
            for (size_t i = 0; i < members.size(); ++i) {
                frame.index.emplace(members[i].first, i);
            }
        }
        const auto [place, inserted] = frame.index.emplace(frame.key, members.size());
        if (inserted) {
            members.emplace_back(std::move(frame.key), std::move(value));
        } else {
            members[place->second].second = std::move(value);
        }
    }

    Value& root_;
    const int depth_max_;
    std::vector<Frame> stack_;
    std::string error_;
};

struct Style {
    std::string_view item_separator;
    std::string_view key_separator;
    bool python_floats;
};

void append_float(std::string& out, double value, bool python) {
    if (std::isfinite(value) || python) {
        append_python_float(out, value);
    } else {
        out += "null";
    }
}

void write(std::string& out, const Value& value, const Style& style) {
    switch (value.type()) {
        case Type::kNull:
            out += "null";
            return;
        case Type::kBool:
            out += value.as_bool() ? "true" : "false";
            return;
        case Type::kInteger:
            out += value.big_digits().empty() ? fmt::format("{}", *value.as_int64()) : value.big_digits();
            return;
        case Type::kFloat:
            append_float(out, value.as_double(), style.python_floats);
            return;
        case Type::kString:
            append_string(out, value.as_string());
            return;
        case Type::kArray: {
            out += '[';
            std::string_view separator;
            for (const Value& item : value.items()) {
                out += separator;
                write(out, item, style);
                separator = style.item_separator;
            }
            out += ']';
            return;
        }
        case Type::kObject: {
            out += '{';
            std::string_view separator;
            for (const auto& [key, member] : value.members()) {
                out += separator;
                append_string(out, key);
                out += style.key_separator;
                write(out, member, style);
                separator = style.item_separator;
            }
            out += '}';
            return;
        }
    }
}

}  // namespace

std::string_view type_name(Type type) {
    switch (type) {
        case Type::kNull:
            return "null";
        case Type::kBool:
            return "boolean";
        case Type::kInteger:
            return "integer";
        case Type::kFloat:
            return "number";
        case Type::kString:
            return "string";
        case Type::kArray:
            return "array";
        case Type::kObject:
            return "object";
    }
    return "unknown";
}

Value::Value(uint64_t value) : type_(Type::kInteger), integer_(static_cast<int64_t>(value)) {
    if (value > static_cast<uint64_t>(INT64_MAX)) {
        string_ = fmt::format("{}", value);
        float_ = static_cast<double>(value);
    }
}

Value Value::array(std::vector<Value> items) {
    Value made;
    made.type_ = Type::kArray;
    made.items_ = std::move(items);
    return made;
}

Value Value::object(std::vector<Member> members) {
    Value made;
    made.type_ = Type::kObject;
    made.members_ = std::move(members);
    return made;
}

Value Value::big_integer(std::string digits) {
    Value made;
    made.type_ = Type::kInteger;
    made.float_ = std::strtod(digits.c_str(), nullptr);
    made.string_ = std::move(digits);
    return made;
}

std::optional<int64_t> Value::as_int64() const {
    if (type_ != Type::kInteger || !string_.empty()) {
        return std::nullopt;
    }
    return integer_;
}

double Value::as_double() const {
    if (type_ == Type::kFloat || !string_.empty()) {
        return float_;
    }
    return static_cast<double>(integer_);
}

const Value* Value::find(std::string_view key) const {
    for (const auto& [name, value] : members_) {
        if (name == key) {
            return &value;
        }
    }
    return nullptr;
}

void Value::set(std::string key, Value value) {
    for (auto& [name, old] : members_) {
        if (name == key) {
            old = std::move(value);
            return;
        }
    }
    members_.emplace_back(std::move(key), std::move(value));
}

Result<Value> parse(std::string_view text, const ParseLimits& limits) {
    if (text.size() > limits.bytes_max) {
        return invalid_argument(fmt::format("a JSON document of {} bytes is over the limit of {}",
                                            text.size(), limits.bytes_max));
    }
    Value root;
    Builder builder(root, limits.depth_max);
    if (!nlohmann::json::sax_parse(text, &builder)) {
        return invalid_argument(builder.error().empty() ? "invalid JSON" : builder.error());
    }
    return root;
}

std::string dump(const Value& value) {
    std::string out;
    write(out, value, {",", ":", false});
    return out;
}

std::string dump_python(const Value& value) {
    std::string out;
    write(out, value, {", ", ": ", true});
    return out;
}

void append_string(std::string& out, std::string_view text) {
    out += '"';
    size_t i = 0;
    while (i < text.size()) {
        const auto byte = static_cast<unsigned char>(text[i]);
        if (byte >= 0x80) {
            const Utf8Step step = utf8_next(text.substr(i));
            out += step.valid ? text.substr(i, step.length) : kReplacementCharacter;
            i += step.length;
            continue;
        }
        switch (byte) {
            case '"':
                out += "\\\"";
                break;
            case '\\':
                out += "\\\\";
                break;
            case '\n':
                out += "\\n";
                break;
            case '\r':
                out += "\\r";
                break;
            case '\t':
                out += "\\t";
                break;
            case '\b':
                out += "\\b";
                break;
            case '\f':
                out += "\\f";
                break;
            default:
                if (byte < 0x20) {
                    out += fmt::format("\\u{:04x}", byte);
                } else {
                    out += static_cast<char>(byte);
                }
        }
        ++i;
    }
    out += '"';
}

void append_python_float(std::string& out, double value) {
    if (std::isnan(value)) {
        out += "NaN";
        return;
    }
    if (std::isinf(value)) {
        out += value > 0 ? "Infinity" : "-Infinity";
        return;
    }
    // Shortest digits that read back; repr() uses the exponent form below 1e-4 and from 1e16 on.
    char buffer[64];
    const double size = std::fabs(value);
    const bool exponent = size != 0 && (size < 1e-4 || size >= 1e16);
    const auto form = exponent ? std::chars_format::scientific : std::chars_format::fixed;
    const auto end = std::to_chars(buffer, buffer + sizeof(buffer), value, form).ptr;
    std::string_view digits(buffer, static_cast<size_t>(end - buffer));
    out += digits;
    if (!exponent && digits.find('.') == std::string_view::npos) {
        out += ".0";
    }
}

}  // namespace tessera::json

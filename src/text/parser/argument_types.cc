#include "text/parser/argument_types.h"

#include <algorithm>
#include <charconv>
#include <cmath>
#include <optional>

namespace tessera {
namespace {

using json::Value;

constexpr int kDepthMax = 16;  // of nested schemas and references

std::string lowercase(std::string_view text) {
    std::string out(text);
    std::transform(out.begin(), out.end(), out.begin(),
                   [](char c) { return c >= 'A' && c <= 'Z' ? static_cast<char>(c + ('a' - 'A')) : c; });
    return out;
}

bool starts_with_any(std::string_view text, std::initializer_list<std::string_view> prefixes) {
    return std::any_of(prefixes.begin(), prefixes.end(),
                       [&](std::string_view prefix) { return text.starts_with(prefix); });
}

bool is_any(std::string_view text, std::initializer_list<std::string_view> names) {
    return std::find(names.begin(), names.end(), text) != names.end();
}

void add_named_type(std::string_view raw, ArgumentTypes& types) {
    const std::string name = lowercase(raw);
    if (is_any(name, {"string", "str", "text", "varchar", "char", "enum"})) {
        types.string = true;
    } else if (is_any(name, {"boolean", "bool", "binary"})) {
        types.boolean = true;
    } else if (starts_with_any(name, {"int", "uint", "long", "short", "unsigned"})) {
        types.integer = true;
    } else if (name == "double" || starts_with_any(name, {"num", "float"})) {
        types.number = true;
    } else if (is_any(name, {"array", "list"})) {
        types.array = true;
    } else if (is_any(name, {"object", "dict", "map"})) {
        types.object = true;
    } else if (name == "null") {
        types.null = true;
    } else {
        types.other = true;
    }
}

void add_type_of(const Value& example, ArgumentTypes& types) {
    add_named_type(example.is_null() ? "null" : json::type_name(example.type()), types);
}

// A reference inside the function's parameters: "#/$defs/City".
const Value* resolve(const Value& root, std::string_view reference) {
    if (!reference.starts_with("#/")) {
        return nullptr;
    }
    reference.remove_prefix(2);
    const Value* at = &root;
    while (at != nullptr && !reference.empty()) {
        const size_t slash = std::min(reference.find('/'), reference.size());
        at = at->find(reference.substr(0, slash));
        reference.remove_prefix(std::min(slash + 1, reference.size()));
    }
    return at;
}

bool add_schema(const Value& root, const Value& schema, int depth, ArgumentTypes& types);

// An alternative that says nothing is a string; a part of an allOf that says nothing leaves it to the others.
bool add_options(const Value& root, const Value& options, int depth, ArgumentTypes& types, bool all) {
    bool any_said = !all;
    for (const Value& option : options.items()) {
        const bool said = add_schema(root, option, depth + 1, types);
        types.string = types.string || (!said && !all);
        any_said = any_said || said;
    }
    return any_said;
}

// Adds what a schema says; false when it says nothing.
bool add_schema(const Value& root, const Value& schema, int depth, ArgumentTypes& types) {
    if (!schema.is_object() || depth > kDepthMax) {
        return false;
    }
    if (const Value* type = schema.find("type")) {
        if (type->is_string()) {
            add_named_type(type->as_string(), types);
            return true;
        }
        for (const Value& item : type->items()) {
            if (item.is_string()) {
                add_named_type(item.as_string(), types);
            }
        }
        return true;
    }
    for (const char* key : {"anyOf", "oneOf", "allOf"}) {
        if (const Value* options = schema.find(key); options != nullptr && options->is_array()) {
            return add_options(root, *options, depth, types, std::string_view(key) == "allOf");
        }
    }
    if (const Value* reference = schema.find("$ref"); reference != nullptr && reference->is_string()) {
        const Value* target = resolve(root, reference->as_string());
        return target != nullptr && add_schema(root, *target, depth + 1, types);
    }
    if (const Value* values = schema.find("enum"); values != nullptr && values->is_array()) {
        for (const Value& value : values->items()) {
            add_type_of(value, types);
        }
        return true;
    }
    if (const Value* value = schema.find("const")) {
        add_type_of(*value, types);
        return true;
    }
    return false;
}

// The parameters of a function; null when no tool has that name.
const Value* parameters_of(const Value& tools, std::string_view function) {
    for (const Value& tool : tools.items()) {
        const Value* spec = tool.find("function");
        const Value* name = spec == nullptr ? nullptr : spec->find("name");
        if (name != nullptr && name->is_string() && name->as_string() == function) {
            return spec->find("parameters");
        }
    }
    return nullptr;
}

std::string_view trimmed(std::string_view text) {
    constexpr std::string_view kSpace = " \t\n\r\f\v";
    const size_t begin = text.find_first_not_of(kSpace);
    if (begin == std::string_view::npos) {
        return {};
    }
    return text.substr(begin, text.find_last_not_of(kSpace) - begin + 1);
}

std::optional<std::string> read_boolean(std::string_view text) {
    const std::string name = lowercase(trimmed(text));
    return name == "true" || name == "false" ? std::optional(name) : std::nullopt;
}

// Decimal digits with a sign, and single underscores between digits.
std::optional<std::string> read_integer(std::string_view text) {
    text = trimmed(text);
    const bool negative = text.starts_with('-');
    if (negative || text.starts_with('+')) {
        text.remove_prefix(1);
    }
    std::string digits;
    char previous = '_';
    for (const char c : text) {
        if (c >= '0' && c <= '9') {
            digits += c;
        } else if (c != '_' || previous == '_') {
            return std::nullopt;
        }
        previous = c;
    }
    if (digits.empty() || previous == '_') {
        return std::nullopt;
    }
    digits.erase(0, std::min(digits.find_first_not_of('0'), digits.size() - 1));
    return negative && digits != "0" ? "-" + digits : digits;
}

std::optional<std::string> read_number(std::string_view text) {
    text = trimmed(text);
    if (text.find_first_of(".eE") == std::string_view::npos) {
        return read_integer(text);
    }
    if (text.starts_with('+')) {
        text.remove_prefix(1);
        if (text.starts_with('-')) {
            return std::nullopt;
        }
    }
    double value = 0;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), value);
    if (error != std::errc() || end != text.data() + text.size() || !std::isfinite(value)) {
        return std::nullopt;
    }
    std::string out;
    json::append_python_float(out, value);
    return out;
}

bool allows(const ArgumentTypes& types, const Value& value) {
    switch (value.type()) {
        case json::Type::kNull:
            return types.null;
        case json::Type::kBool:
            return types.boolean;
        case json::Type::kInteger:
            return types.integer || types.number;
        case json::Type::kFloat:
            return types.number;
        case json::Type::kString:
            return types.string;
        case json::Type::kArray:
            return types.array;
        case json::Type::kObject:
            return types.object;
    }
    return false;
}

}  // namespace

ArgumentTypes argument_types(const Value& tools, std::string_view function, std::string_view argument) {
    ArgumentTypes types;
    const Value* parameters = parameters_of(tools, function);
    const Value* properties = parameters == nullptr ? nullptr : parameters->find("properties");
    const Value* schema = properties == nullptr ? nullptr : properties->find(argument);
    if (schema == nullptr || !add_schema(*parameters, *schema, 0, types)) {
        types.string = true;
    }
    return types;
}

std::string argument_json(const ArgumentTypes& types, std::string_view text) {
    std::optional<std::string> plain;
    if (types.boolean && (plain = read_boolean(text))) {
        return *plain;
    }
    if (types.integer && (plain = read_integer(text))) {
        return *plain;
    }
    if (types.number && (plain = read_number(text))) {
        return *plain;
    }
    // Where a string is allowed, a text is one unless it reads as one of the other types.
    if (!types.only_string()) {
        const Result<Value> value = json::parse(text);
        if (value.ok() && (!types.string || types.other || allows(types, *value)) &&
            !(types.string && value->is_string())) {
            return json::dump_python(*value);
        }
    }
    std::string out;
    json::append_string(out, text);
    return out;
}

}  // namespace tessera

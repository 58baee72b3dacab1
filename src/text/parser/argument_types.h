// The JSON form of a tool call's argument: the model writes plain text, the tool's schema says what it means.
#pragma once

#include <string>
#include <string_view>

#include "base/json.h"

namespace tessera {

// What a schema allows, as far as it decides how a text is read. Spellings that are no JSON Schema but that
// tools use
// ("int", "float32", "str", "list", "dict", ...) count as what they mean.
struct ArgumentTypes {
    bool boolean = false;
    bool integer = false;
    bool number = false;
    bool string = false;
    bool array = false;
    bool object = false;
    bool null = false;
    bool other = false;  // a type that we do not know: any JSON

    bool only_string() const {
        return string && !boolean && !integer && !number && !array && !object && !other;
    }
};

// The types of one argument of one function of the request's tools. Expands lists of types, anyOf, oneOf,
// allOf, enum, const and local $ref; an argument or a function that no tool describes is a string.
ArgumentTypes argument_types(const json::Value& tools, std::string_view function, std::string_view argument);

// The text as JSON: a boolean, an integer, a number, any JSON, a string, the first of these that the types
// allow and the text is. A text that fits no type becomes what it reads as in JSON, else a string; the result
// is always valid.
std::string argument_json(const ArgumentTypes& types, std::string_view text);

}  // namespace tessera

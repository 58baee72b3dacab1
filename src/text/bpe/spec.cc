#include "text/bpe/spec.h"

namespace tessera::bpe {

std::string spec_type(const json::Value& spec) {
    return spec_string(spec, "type");
}

std::string spec_string(const json::Value& spec, std::string_view key) {
    const json::Value* value = spec.find(key);
    return value != nullptr && value->is_string() ? value->as_string() : std::string();
}

bool spec_bool(const json::Value& spec, std::string_view key, bool otherwise) {
    const json::Value* value = spec.find(key);
    return value != nullptr && value->is_bool() ? value->as_bool() : otherwise;
}

Result<Regex> spec_pattern(const json::Value& spec) {
    const json::Value* pattern = spec.find("pattern");
    if (pattern != nullptr) {
        if (const json::Value* regex = pattern->find("Regex"); regex != nullptr && regex->is_string()) {
            return Regex::compile(regex->as_string());
        }
        if (const json::Value* text = pattern->find("String"); text != nullptr && text->is_string()) {
            return Regex::literal(text->as_string());
        }
    }
    return invalid_argument("\"pattern\" must be {\"Regex\": text} or {\"String\": text}");
}

}  // namespace tessera::bpe

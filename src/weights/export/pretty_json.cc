#include "weights/export/pretty_json.h"

namespace tessera {
namespace {

void append(std::string& out, const json::Value& value, size_t depth) {
    const size_t count = value.is_object() ? value.members().size() : value.items().size();
    if (count == 0) {
        out += json::dump_python(value);
        return;
    }
    const std::string line = "\n" + std::string(2 * depth + 2, ' ');
    out += value.is_object() ? '{' : '[';
    for (size_t i = 0; i < count; ++i) {
        out += i == 0 ? line : "," + line;
        if (value.is_object()) {
            json::append_string(out, value.members()[i].first);
            out += ": ";
            append(out, value.members()[i].second, depth + 1);
        } else {
            append(out, value.items()[i], depth + 1);
        }
    }
    out += line.substr(0, line.size() - 2);
    out += value.is_object() ? '}' : ']';
}

}  // namespace

std::string pretty_json(const json::Value& value) {
    std::string out;
    append(out, value, 0);
    return out;
}

}  // namespace tessera

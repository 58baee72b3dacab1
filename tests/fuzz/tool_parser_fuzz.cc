// The output parser: the first bytes choose suffix, state and cuts, the rest is the model's output. Every way
// of cutting it gives the same result, and the arguments of every call are a JSON object.
#include <algorithm>
#include <cstdint>
#include <string_view>

#include "base/check.h"
#include "base/json.h"
#include "text/parser/parsed_output_testing.h"

namespace {

constexpr const char* kTools = R"([
    {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {
        "s": {"type": "string"}, "i": {"type": "integer"}, "n": {"type": "number"}, "b": {"type": "boolean"},
        "o": {"type": "object"}, "u": {"anyOf": [{"type": "string"}, {"type": "array"}]}}}}}])";

constexpr size_t kHeader = 2;

}  // namespace

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
    using namespace tessera;
    if (size < kHeader) {
        return 0;
    }
    static const json::Value tools = *json::parse(kTools);
    const uint8_t choice = data[0];
    const OutputParserConfig config{
        .suffix = (choice & 1) != 0 ? ":opensource" : "",
        .start = (choice & 2) != 0 ? OutputStart::kReasoning : OutputStart::kContent,
        .parse_reasoning = (choice & 4) == 0,
        .parse_tools = (choice & 8) == 0,
        .tools = tools,
        .tool_calls_max = (choice & 16) != 0 ? 1 : 1 << 20};
    const std::string_view text(reinterpret_cast<const char*>(data) + kHeader, size - kHeader);
    const ParsedOutput whole = parse_output(config, text);
    // Cuts at a stride, and a cut at every byte.
    for (const size_t stride : {size_t{1}, size_t{data[1]} + 1}) {
        std::vector<size_t> cuts;
        for (size_t at = stride; at < text.size(); at += stride) {
            cuts.push_back(at);
        }
        check(parse_output(config, text, cuts) == whole, "the cuts do not show in the result");
    }
    check(static_cast<int32_t>(whole.calls.size()) <= config.tool_calls_max, "no more calls than allowed");
    for (const ParsedOutput::Call& call : whole.calls) {
        const Result<json::Value> arguments = json::parse(call.arguments);
        check(arguments.ok() && arguments->is_object(), "arguments are a JSON object");
    }
    return 0;
}

// For tests and fuzzers: an OutputParser's deltas put together again, with what must hold for each of them.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "base/check.h"
#include "base/utf8.h"
#include "text/output_parser.h"

namespace tessera {

struct ParsedOutput {
    struct Call {
        std::string name, arguments;
        bool operator==(const Call&) const = default;
    };
    std::string reasoning, content;
    std::vector<Call> calls;
    bool operator==(const ParsedOutput&) const = default;

    void add(const OutputDelta& delta) {
        reasoning += delta.reasoning;
        content += delta.content;
        for (const ToolCallDelta& call : delta.tool_calls) {
            if (!call.name.empty()) {
                check(call.index == static_cast<int32_t>(calls.size()), "calls are numbered as they begin");
                calls.push_back({call.name, {}});
            }
            check(call.index + 1 == static_cast<int32_t>(calls.size()), "a delta belongs to the newest call");
            check(!utf8_incomplete_tail(call.arguments), "no delta ends inside a character");
            calls.back().arguments += call.arguments;
        }
    }
};

// Parses text cut at the given ascending places.
inline ParsedOutput parse_output(const OutputParserConfig& config, std::string_view text,
                                 const std::vector<size_t>& cuts = {}) {
    OutputParser parser(config);
    ParsedOutput out;
    size_t done = 0;
    for (const size_t cut : cuts) {
        out.add(parser.push(text.substr(done, cut - done)));
        done = cut;
    }
    out.add(parser.push(text.substr(done)));
    out.add(parser.finish());
    return out;
}

}  // namespace tessera

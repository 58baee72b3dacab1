// OutputParser: the model's text -> reasoning, content and tool calls, incrementally. The same result for
// every way of cutting the text into chunks; arguments are JSON typed by the tool's schema and always valid
// once a call is closed.
#pragma once

#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "base/json.h"
#include "text/hy3_format.h"

namespace tessera {

struct ToolCallDelta {
    int32_t index = 0;
    std::string name;       // set in the first delta of a call only
    std::string arguments;  // the next piece of the arguments' JSON text
};

struct OutputDelta {
    std::string reasoning;
    std::string content;
    std::vector<ToolCallDelta> tool_calls;
    bool empty() const { return reasoning.empty() && content.empty() && tool_calls.empty(); }
};

struct OutputParserConfig {
    std::string suffix;
    OutputStart start = OutputStart::kContent;
    bool parse_reasoning = true;
    bool parse_tools = false;          // tools were given and tool_choice is not none
    json::Value tools;                 // the request's tools array, for the types of arguments
    int32_t tool_calls_max = 1 << 20;  // parallel_tool_calls = false: 1
};

class OutputParser {
  public:
    explicit OutputParser(OutputParserConfig config);
    ~OutputParser();
    OutputDelta push(std::string_view text);
    // The end of the output: releases what was held back; an unclosed call is salvaged as far as it is
    // well-formed.
    OutputDelta finish();
    int32_t tool_calls() const;  // begun so far
    bool limit_reached() const;  // tool_calls_max calls are closed: the request may stop

  private:
    struct Impl;
    std::unique_ptr<Impl> impl_;
};

}  // namespace tessera

// The calibration file of `tessera quantize`: what the model reads while its activations are observed.
#pragma once

#include <string>
#include <vector>

#include "base/status.h"
#include "text/tokenizer.h"
#include "types/model_config.h"

namespace tessera {

struct CalibrationLimits {
    int32_t samples_max = 0;  // the first ones of the file
    int32_t tokens_max = 0;   // of a sample; the rest is left out
};

// A sample a line (.jsonl or .jsonl.gz), one of
//   {"text": TEXT}                                  special tokens in it are recognised
//   {"messages": [...], "tools"?, "kwargs"?}        a conversation, as a chat request has it
//   {"ids": [...]}                                  token ids
// An error names the line. At least one sample, each of at least one token.
Result<std::vector<std::vector<TokenId>>> read_calibration(const std::string& path,
                                                           const Tokenizer& tokenizer, int64_t vocab_size,
                                                           const CalibrationLimits& limits);

}  // namespace tessera

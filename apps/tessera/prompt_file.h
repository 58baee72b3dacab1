// The id files of --ids and --prompt-ids: {"ids":[...]} or a JSON list of such objects.
#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "base/json.h"
#include "base/status.h"
#include "types/model_config.h"

namespace tessera {

Result<std::string> read_file(const std::string& path);  // "-" = standard input
// Every id is checked against the vocabulary.
Result<std::vector<std::vector<TokenId>>> read_id_file(const std::string& path, int64_t vocab_size);
// The ids of a JSON list; an error names the item as key[i] and the vocabulary's range.
Result<std::vector<TokenId>> token_ids(const json::Value& list, std::string_view key, int64_t vocab_size);
// The lines of a .jsonl or, through zlib, a .jsonl.gz. Blank ones are among them, so that an index tells the
// line's number.
Result<std::vector<std::string>> read_lines(const std::string& path);
bool is_blank(std::string_view line);

}  // namespace tessera

// Tokenizer: byte-level BPE from a Hugging Face tokenizer.json, equal to the tokenizers library's result.
#pragma once

#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "types/model_config.h"

namespace tessera {

// Immutable after load(); every member may be called from any thread.
class Tokenizer {
  public:
    // Reads tokenizer.json and tokenizer_config.json of the folder.
    static Result<std::unique_ptr<Tokenizer>> load(const std::string& folder);
    static Result<std::unique_ptr<Tokenizer>> parse(std::string_view tokenizer_json,
                                                    std::string_view tokenizer_config_json);
    virtual ~Tokenizer() = default;

    // Added tokens (special or not) are cut out of the text first, leftmost-longest. Nothing is prepended. An
    // error when a split regex runs over its match limits.
    virtual Result<std::vector<TokenId>> encode(std::string_view text) const = 0;
    // Text in which added tokens are NOT recognised: what a user typed cannot become a structural token.
    virtual Result<std::vector<TokenId>> encode_plain(std::string_view text) const = 0;
    // The bytes of all tokens are joined first; each maximal invalid UTF-8 subsequence becomes one U+FFFD.
    // Ids without a token give nothing.
    virtual std::string decode(std::span<const TokenId> ids, bool skip_special) const = 0;
    // A token's raw bytes (may be part of a code point); empty for an id without a token.
    virtual std::string_view token_bytes(TokenId id) const = 0;
    virtual bool is_special(TokenId id) const = 0;  // an added token with special = true
    virtual std::optional<TokenId> added_token(std::string_view content) const = 0;
    // Highest id + 1.
    virtual int32_t size() const = 0;
    // The suffix of Hy3's structural tokens (":opensource", or empty): token_suffix of tokenizer_config.json,
    // else found among the added tokens.
    virtual const std::string& token_suffix() const = 0;
};

}  // namespace tessera

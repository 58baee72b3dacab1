// The tokens of a tokenizer.json: ids, bytes, merge ranks, added tokens.
#pragma once

#include <array>
#include <deque>
#include <span>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "base/json.h"
#include "base/status.h"
#include "text/bpe/added_tokens.h"
#include "text/bpe/merges.h"

namespace tessera::bpe {

// Immutable once loaded.
class Vocabulary {
  public:
    // Reads "model" and "added_tokens". The errors name the field.
    static Result<Vocabulary> load(const json::Value& tokenizer_json);

    int32_t size() const { return static_cast<int32_t>(places_.size()); }
    // A token's bytes; empty for an id without a token.
    std::string_view bytes(TokenId id) const;
    bool is_special(TokenId id) const { return id >= 0 && id < size() && places_[id].special; }
    const std::deque<AddedToken>& added_tokens() const { return added_; }
    const AddedToken* added_token(std::string_view content) const;

    const MergeTable& merges() const { return merges_; }
    // With ignore_merges: the token of a whole piece, or kNoToken.
    TokenId whole_piece(std::string_view piece) const;

  private:
    struct Place {
        uint32_t offset = 0;
        uint32_t size = 0;
        bool special = false;
    };
    using Ids = std::unordered_map<std::string_view, TokenId>;

    Status load_tokens(const json::Value& vocab, Ids& ids);
    Status load_bytes(const json::Value& model, const Ids& ids);
    Status load_merges(const json::Value& merges, const Ids& ids);
    Status load_added(const json::Value& tokens, const Ids& ids);
    Status place(TokenId id, std::string_view content);

    std::string arena_;
    std::vector<Place> places_;  // [id]
    MergeTable merges_;
    std::deque<AddedToken> added_;  // addresses stay
    std::unordered_map<std::string_view, const AddedToken*> added_by_content_;
    bool ignore_merges_ = false;
    std::unordered_map<std::string, TokenId> whole_;  // by bytes; filled for ignore_merges only
};

}  // namespace tessera::bpe

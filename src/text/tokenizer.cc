#include "text/tokenizer.h"

#include <algorithm>
#include <bit>
#include <filesystem>
#include <fmt/format.h>
#include <fstream>
#include <functional>

#include "base/json.h"
#include "base/utf8.h"
#include "text/bpe/normalizer.h"
#include "text/bpe/pre_tokenizer.h"
#include "text/bpe/spec.h"
#include "text/bpe/vocabulary.h"

namespace tessera {
namespace {

using bpe::AddedToken;
using bpe::AddedTokenMatcher;

constexpr size_t kTextMax = size_t{1} << 30;  // positions are 32 bits wide
constexpr int kJsonDepthMax = 64;

// Remembers where pieces of this text were encoded before. Direct-mapped: a collision forgets the older
// piece.
class PieceCache {
  public:
    // Small texts have little to repeat, and clearing the slots costs.
    explicit PieceCache(size_t text_size) {
        if (text_size >= kTextMin) {
            slots_.resize(std::min(std::bit_ceil(text_size / kBytesPerSlot), kSlotsMax));
        }
    }

    // Appends the tokens of an equal piece seen before; the piece must stay where it is while the cache
    // lives.
    bool append(std::string_view piece, std::vector<TokenId>& out) {
        Slot* slot = find(piece);
        if (slot == nullptr || slot->piece != piece) {
            return false;
        }
        for (uint32_t i = 0; i < slot->count; ++i) {
            out.push_back(out[slot->first + i]);
        }
        return true;
    }

    void remember(std::string_view piece, size_t first, size_t count) {
        if (Slot* slot = find(piece)) {
            *slot = {piece, static_cast<uint32_t>(first), static_cast<uint32_t>(count)};
        }
    }

  private:
    struct Slot {
        std::string_view piece;  // empty: free
        uint32_t first = 0, count = 0;
    };
    static constexpr size_t kTextMin = 1024;
    static constexpr size_t kBytesPerSlot = 8;
    static constexpr size_t kSlotsMax = 16384;
    static constexpr size_t kPieceMax = 32;

    Slot* find(std::string_view piece) {
        if (slots_.empty() || piece.size() < 2 || piece.size() > kPieceMax) {
            return nullptr;
        }
        return &slots_[std::hash<std::string_view>()(piece) & (slots_.size() - 1)];
    }

    std::vector<Slot> slots_;
};

// What one call of encode() works with.
struct EncodeState {
    explicit EncodeState(size_t text_size) : cache(text_size) { ids.reserve(text_size / 4 + 8); }
    bpe::SplitScratch split;
    bpe::MergeScratch merge;
    PieceCache cache;
    std::vector<TokenId> ids;
};

class BpeTokenizer final : public Tokenizer {
  public:
    static Result<std::unique_ptr<Tokenizer>> create(const json::Value& file, const json::Value& config);

    Result<std::vector<TokenId>> encode(std::string_view text) const override { return run(text, true); }
    Result<std::vector<TokenId>> encode_plain(std::string_view text) const override {
        return run(text, false);
    }
    std::string decode(std::span<const TokenId> ids, bool skip_special) const override;
    std::string_view token_bytes(TokenId id) const override { return vocabulary_.bytes(id); }
    bool is_special(TokenId id) const override { return vocabulary_.is_special(id); }
    std::optional<TokenId> added_token(std::string_view content) const override;
    int32_t size() const override { return vocabulary_.size(); }
    const std::string& token_suffix() const override { return suffix_; }

    BpeTokenizer(bpe::Vocabulary vocabulary, bpe::Normalizer normalizer, bpe::PreTokenizer pre_tokenizer)
        : vocabulary_(std::move(vocabulary)),
          normalizer_(std::move(normalizer)),
          pre_tokenizer_(std::move(pre_tokenizer)) {}

  private:
    Status build_matchers();
    void find_suffix(const json::Value& config);
    Result<std::vector<TokenId>> run(std::string_view text, bool added) const;
    Status encode_normalized(std::string_view text, bool added, EncodeState& state) const;
    Status encode_text(std::string_view text, EncodeState& state) const;

    bpe::Vocabulary vocabulary_;
    bpe::Normalizer normalizer_;
    bpe::PreTokenizer pre_tokenizer_;
    std::deque<AddedToken> normalized_;  // what matches_normalized_ looks for
    std::optional<AddedTokenMatcher> matches_given_, matches_normalized_;
    std::string suffix_;
};

Status named(std::string_view file, const Status& status) {
    return {status.code(), fmt::format("{}: {}", file, status.message())};
}

Status check_decoder(const json::Value& file) {
    const json::Value* decoder = file.find("decoder");
    const std::string type = decoder == nullptr ? std::string() : bpe::spec_type(*decoder);
    if (type != "ByteLevel") {
        return unimplemented(fmt::format("decoder: type {:?} is not supported, only \"ByteLevel\" is", type));
    }
    return {};
}

Result<std::unique_ptr<Tokenizer>> BpeTokenizer::create(const json::Value& file, const json::Value& config) {
    const json::Value none;
    const auto field = [&](std::string_view key) -> const json::Value& {
        const json::Value* value = file.find(key);
        return value == nullptr ? none : *value;
    };
    if (Status status = check_decoder(file); !status.ok()) {
        return status;
    }
    Result<bpe::Vocabulary> vocabulary = bpe::Vocabulary::load(file);
    if (!vocabulary.ok()) {
        return vocabulary.status();
    }
    Result<bpe::Normalizer> normalizer = bpe::Normalizer::parse(field("normalizer"));
    if (!normalizer.ok()) {
        return normalizer.status();
    }
    Result<bpe::PreTokenizer> pre_tokenizer = bpe::PreTokenizer::parse(field("pre_tokenizer"));
    if (!pre_tokenizer.ok()) {
        return pre_tokenizer.status();
    }
    auto made = std::make_unique<BpeTokenizer>(vocabulary.take(), normalizer.take(), pre_tokenizer.take());
    if (Status status = made->build_matchers(); !status.ok()) {
        return status;
    }
    made->find_suffix(config);
    return std::unique_ptr<Tokenizer>(std::move(made));
}

// Tokens that are looked for in normalised text are normalised themselves first.
Status BpeTokenizer::build_matchers() {
    std::vector<const AddedToken*> given, normalized;
    bpe::RegexScratch scratch;
    for (const AddedToken& token : vocabulary_.added_tokens()) {
        if (!token.normalized) {
            given.push_back(&token);
            continue;
        }
        Result<std::string> content = normalizer_.apply(token.content, scratch);
        if (!content.ok()) {
            return content.status();
        }
        if (!content->empty()) {
            normalized_.push_back(token);
            normalized_.back().content = content.take();
            normalized.push_back(&normalized_.back());
        }
    }
    Result<AddedTokenMatcher> matches_given = AddedTokenMatcher::build(std::move(given));
    Result<AddedTokenMatcher> matches_normalized = AddedTokenMatcher::build(std::move(normalized));
    if (!matches_given.ok() || !matches_normalized.ok()) {
        return matches_given.ok() ? matches_normalized.status() : matches_given.status();
    }
    matches_given_ = matches_given.take();
    matches_normalized_ = matches_normalized.take();
    return {};
}

// The configuration's own word, else what follows the name in the added token <think...> (or
// <tool_calls...>).
void BpeTokenizer::find_suffix(const json::Value& config) {
    const json::Value* given = config.find("token_suffix");
    if (given != nullptr && given->is_string()) {
        suffix_ = given->as_string();
        return;
    }
    for (const std::string_view name : {"<think", "<tool_calls"}) {
        for (const AddedToken& token : vocabulary_.added_tokens()) {
            std::string_view rest = token.content;
            if (!rest.starts_with(name) || !rest.ends_with('>')) {
                continue;
            }
            rest = rest.substr(name.size(), rest.size() - name.size() - 1);
            const bool suffixed =
                rest.size() > 1 && rest[0] == ':' && rest.find('>') == std::string_view::npos;
            if (rest.empty() || suffixed) {
                suffix_ = rest;
                return;
            }
        }
    }
}

std::optional<TokenId> BpeTokenizer::added_token(std::string_view content) const {
    const AddedToken* token = vocabulary_.added_token(content);
    return token == nullptr ? std::nullopt : std::optional(token->id);
}

std::string BpeTokenizer::decode(std::span<const TokenId> ids, bool skip_special) const {
    std::string bytes;
    for (const TokenId id : ids) {
        if (!skip_special || !is_special(id)) {
            bytes += token_bytes(id);
        }
    }
    return utf8_valid(bytes) ? bytes : utf8_replace_invalid(bytes);
}

Result<std::vector<TokenId>> BpeTokenizer::run(std::string_view text, bool added) const {
    if (text.size() > kTextMax) {
        return invalid_argument(
            fmt::format("a text of {} bytes is over the tokenizer's limit of {}", text.size(), kTextMax));
    }
    std::string replaced;
    if (!utf8_valid(text)) {
        replaced = utf8_replace_invalid(text);
        text = replaced;
    }
    EncodeState state(text.size());
    std::vector<AddedTokenMatcher::Part> parts;
    if (added) {
        matches_given_->split(text, state.split.regex, parts);
    } else if (!text.empty()) {
        parts.push_back({nullptr, {0, text.size()}});
    }
    for (const auto& [token, span] : parts) {
        if (token != nullptr) {
            state.ids.push_back(token->id);
        } else if (Status status =
                       encode_normalized(text.substr(span.begin, span.end - span.begin), added, state);
                   !status.ok()) {
            return status;
        }
    }
    return std::move(state.ids);
}

// Normalises a text without unnormalised added tokens, and cuts out those that are looked for after that.
Status BpeTokenizer::encode_normalized(std::string_view text, bool added, EncodeState& state) const {
    if (!normalizer_.empty()) {
        Result<std::string> normalized = normalizer_.apply(text, state.split.regex);
        if (!normalized.ok()) {
            return normalized.status();
        }
        text = state.split.made.emplace_back(normalized.take());
    }
    if (!added || matches_normalized_->empty()) {
        return encode_text(text, state);
    }
    std::vector<AddedTokenMatcher::Part> parts;
    matches_normalized_->split(text, state.split.regex, parts);
    for (const auto& [token, span] : parts) {
        if (token != nullptr) {
            state.ids.push_back(token->id);
        } else if (Status status = encode_text(text.substr(span.begin, span.end - span.begin), state);
                   !status.ok()) {
            return status;
        }
    }
    return {};
}

Status BpeTokenizer::encode_text(std::string_view text, EncodeState& state) const {
    if (Status status = pre_tokenizer_.split(text, state.split); !status.ok()) {
        return status;
    }
    for (const std::string_view piece : state.split.pieces) {
        if (state.cache.append(piece, state.ids)) {
            continue;
        }
        const size_t first = state.ids.size();
        if (const TokenId whole = vocabulary_.whole_piece(piece); whole != bpe::kNoToken) {
            state.ids.push_back(whole);
        } else {
            vocabulary_.merges().encode(piece, state.merge, state.ids);
        }
        state.cache.remember(piece, first, state.ids.size() - first);
    }
    return {};
}

// kNotFound only where there is nothing of that name.
Result<std::string> read_file(const std::string& path) {
    std::error_code error;
    const std::filesystem::file_status status = std::filesystem::status(path, error);
    if (!std::filesystem::exists(status)) {
        return not_found(fmt::format("{}: cannot be read; a model folder needs it", path));
    }
    if (!std::filesystem::is_regular_file(status)) {  // opening a pipe would wait for its other end
        return invalid_argument(fmt::format("{}: is no regular file", path));
    }
    std::ifstream file(path, std::ios::binary);
    if (!file) {
        return invalid_argument(fmt::format("{}: cannot be opened", path));
    }
    return std::string(std::istreambuf_iterator<char>(file), {});
}

}  // namespace

Result<std::unique_ptr<Tokenizer>> Tokenizer::load(const std::string& folder) {
    std::error_code error;
    if (!std::filesystem::is_directory(folder, error)) {
        return not_found(fmt::format("{}: there is no such model folder", folder));
    }
    Result<std::string> file = read_file(folder + "/tokenizer.json");
    if (!file.ok()) {
        return file.status();
    }
    const Result<std::string> config = read_file(folder + "/tokenizer_config.json");
    if (!config.ok() && config.status().code() != StatusCode::kNotFound) {
        return config.status();
    }
    Result<std::unique_ptr<Tokenizer>> made =
        parse(*file, config.ok() ? std::string_view(*config) : std::string_view());
    if (!made.ok()) {
        return Status(made.status().code(), fmt::format("{}/{}", folder, made.status().message()));
    }
    return made;
}

Result<std::unique_ptr<Tokenizer>> Tokenizer::parse(std::string_view tokenizer_json,
                                                    std::string_view tokenizer_config_json) {
    const Result<json::Value> file = json::parse(tokenizer_json, {.depth_max = kJsonDepthMax});
    if (!file.ok()) {
        return named("tokenizer.json", file.status());
    }
    Result<json::Value> config = json::Value::object();
    if (!tokenizer_config_json.empty()) {
        config = json::parse(tokenizer_config_json, {.depth_max = kJsonDepthMax});
        if (!config.ok()) {
            return named("tokenizer_config.json", config.status());
        }
    }
    Result<std::unique_ptr<Tokenizer>> made = BpeTokenizer::create(*file, *config);
    if (!made.ok()) {
        return named("tokenizer.json", made.status());
    }
    return made;
}

}  // namespace tessera

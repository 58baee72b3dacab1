#include "text/bpe/vocabulary.h"

#include <fmt/format.h>

#include "base/utf8.h"
#include "text/bpe/byte_level.h"
#include "text/bpe/spec.h"

namespace tessera::bpe {
namespace {

constexpr int64_t kIdMax = 1 << 24;  // bounds the tables that a hostile file can ask for

Result<TokenId> read_id(const json::Value* value) {
    const std::optional<int64_t> id = value == nullptr ? std::nullopt : value->as_int64();
    if (!id || *id < 0 || *id > kIdMax) {
        return invalid_argument(fmt::format("its id must be an integer from 0 to {}", kIdMax));
    }
    return static_cast<TokenId>(*id);
}

// The fields of a BPE model that change its results and that byte-level BPE has no use for.
Status check_model(const json::Value& model) {
    const std::string type = spec_type(model);
    if (!type.empty() && type != "BPE") {
        return unimplemented(fmt::format("model: type {:?} is not supported, only \"BPE\" is", type));
    }
    for (const char* key : {"continuing_subword_prefix", "end_of_word_suffix"}) {
        if (!spec_string(model, key).empty()) {
            return unimplemented(fmt::format("model: a {} is not supported", key));
        }
    }
    const json::Value* dropout = model.find("dropout");
    if (dropout != nullptr && dropout->is_number() && dropout->as_double() != 0) {
        return unimplemented("model: dropout is not supported");
    }
    return {};
}

// The two halves of a merge, in either of its spellings.
bool merge_halves(const json::Value& merge, std::string_view& left, std::string_view& right) {
    if (merge.is_array()) {
        const auto& halves = merge.items();
        if (halves.size() != 2 || !halves[0].is_string() || !halves[1].is_string()) {
            return false;
        }
        left = halves[0].as_string();
        right = halves[1].as_string();
        return true;
    }
    if (!merge.is_string()) {
        return false;
    }
    const std::string_view text = merge.as_string();
    const size_t space = text.find(' ');
    if (space == std::string_view::npos || text.find(' ', space + 1) != std::string_view::npos) {
        return false;
    }
    left = text.substr(0, space);
    right = text.substr(space + 1);
    return true;
}

}  // namespace

Result<Vocabulary> Vocabulary::load(const json::Value& file) {
    const json::Value none;
    const json::Value* model = file.find("model");
    const json::Value* added = file.find("added_tokens");
    if (model == nullptr || !model->is_object()) {
        return invalid_argument("\"model\" must be an object");
    }
    const json::Value* vocab = model->find("vocab");
    const json::Value* merges = model->find("merges");
    if (vocab == nullptr || !vocab->is_object() || merges == nullptr || !merges->is_array()) {
        return invalid_argument("model: needs \"vocab\", an object, and \"merges\", a list");
    }
    if (Status status = check_model(*model); !status.ok()) {
        return status;
    }
    Vocabulary made;
    Ids ids;
    Status status = made.load_tokens(*vocab, ids);
    if (status.ok()) {
        status = made.load_bytes(*model, ids);
    }
    if (status.ok()) {
        status = made.load_merges(*merges, ids);
    }
    if (status.ok()) {
        status = made.load_added(added == nullptr ? none : *added, ids);
    }
    if (!status.ok()) {
        return status;
    }
    return made;
}

Status Vocabulary::load_tokens(const json::Value& vocab, Ids& ids) {
    ids.reserve(vocab.members().size());
    for (const auto& [content, value] : vocab.members()) {
        const Result<TokenId> id = read_id(&value);
        if (!id.ok()) {
            return {id.status().code(),
                    fmt::format("model: vocab: token {:?}: {}", content, id.status().message())};
        }
        if (Status status = place(*id, content); !status.ok()) {
            return status;
        }
        ids.emplace(content, *id);
    }
    return {};
}

// As the library decodes: a token spelled in the byte alphabet stands for those bytes, any other for itself.
Status Vocabulary::place(TokenId id, std::string_view content) {
    if (id >= size()) {
        places_.resize(static_cast<size_t>(id) + 1);
    }
    if (places_[id].size != 0) {
        return invalid_argument(fmt::format("id {} belongs to two tokens, one of them {:?}", id, content));
    }
    const std::optional<std::string> bytes = bytes_of_chars(content);
    places_[id].offset = static_cast<uint32_t>(arena_.size());
    arena_ += bytes ? std::string_view(*bytes) : content;
    places_[id].size = static_cast<uint32_t>(arena_.size() - places_[id].offset);
    return {};
}

Status Vocabulary::load_bytes(const json::Value& model, const Ids& ids) {
    int missing = 0;
    for (int byte = 0; byte < 256; ++byte) {
        std::string content;
        utf8_append(content, byte_to_char(static_cast<unsigned char>(byte)));
        const auto found = ids.find(content);
        missing += found == ids.end() ? 1 : 0;
        merges_.set_byte(static_cast<unsigned char>(byte), found == ids.end() ? kNoToken : found->second);
    }
    if (missing > 0 && spec_bool(model, "byte_fallback", false)) {
        return unimplemented(fmt::format(
            "model: byte_fallback with {} bytes missing from the vocabulary is not supported", missing));
    }
    const std::string unknown = spec_string(model, "unk_token");
    if (missing > 0 && !unknown.empty()) {
        const auto found = ids.find(unknown);
        if (found == ids.end()) {
            return invalid_argument(fmt::format("model: unk_token {:?} is not in the vocabulary", unknown));
        }
        merges_.set_unknown(found->second, spec_bool(model, "fuse_unk", false));
    }
    ignore_merges_ = spec_bool(model, "ignore_merges", false);
    if (ignore_merges_) {
        for (const auto& [content, id] : ids) {
            if (std::optional<std::string> bytes = bytes_of_chars(content)) {
                whole_.emplace(std::move(*bytes), id);
            }
        }
    }
    return {};
}

Status Vocabulary::load_merges(const json::Value& merges, const Ids& ids) {
    merges_.reserve(merges.items().size());
    std::string joined;
    int32_t rank = 0;
    for (const json::Value& merge : merges.items()) {
        std::string_view left, right;
        if (!merge_halves(merge, left, right)) {
            return invalid_argument(
                fmt::format("model: merges[{}]: must be [left, right] or \"left right\"", rank));
        }
        joined.assign(left).append(right);
        const auto a = ids.find(left);
        const auto b = ids.find(right);
        const auto merged = ids.find(joined);
        if (a == ids.end() || b == ids.end() || merged == ids.end()) {
            return invalid_argument(fmt::format(
                "model: merges[{}]: {:?} and {:?}, and what they join to, must be in the vocabulary", rank,
                left, right));
        }
        merges_.add(a->second, b->second, {rank, merged->second});
        ++rank;
    }
    return {};
}

Status Vocabulary::load_added(const json::Value& tokens, const Ids& ids) {
    for (size_t i = 0; i < tokens.items().size(); ++i) {
        const json::Value& spec = tokens.items()[i];
        AddedToken token{.content = spec_string(spec, "content"),
                         .special = spec_bool(spec, "special", false),
                         .normalized = spec_bool(spec, "normalized", false),
                         .lstrip = spec_bool(spec, "lstrip", false),
                         .rstrip = spec_bool(spec, "rstrip", false),
                         .single_word = spec_bool(spec, "single_word", false)};
        const Result<TokenId> id = read_id(spec.find("id"));
        if (!id.ok()) {
            return {id.status().code(), fmt::format("added_tokens[{}]: {}", i, id.status().message())};
        }
        if (token.content.empty() || added_token(token.content) != nullptr) {
            return invalid_argument(
                fmt::format("added_tokens[{}]: \"content\" must be a text that no other added token has", i));
        }
        token.id = *id;
        const auto in_vocab = ids.find(token.content);
        if (in_vocab == ids.end()) {
            if (Status status = place(token.id, token.content); !status.ok()) {
                return {status.code(), fmt::format("added_tokens[{}]: {}", i, status.message())};
            }
        } else if (in_vocab->second != token.id) {
            return invalid_argument(
                fmt::format("added_tokens[{}]: {:?} has id {} here and {} in the vocabulary", i,
                            token.content, token.id, in_vocab->second));
        }
        places_[token.id].special = token.special;
        added_.push_back(std::move(token));
        added_by_content_.emplace(added_.back().content, &added_.back());
    }
    return {};
}

std::string_view Vocabulary::bytes(TokenId id) const {
    if (id < 0 || id >= size()) {
        return {};
    }
    return std::string_view(arena_).substr(places_[id].offset, places_[id].size);
}

const AddedToken* Vocabulary::added_token(std::string_view content) const {
    const auto found = added_by_content_.find(content);
    return found == added_by_content_.end() ? nullptr : found->second;
}

TokenId Vocabulary::whole_piece(std::string_view piece) const {
    if (!ignore_merges_) {
        return kNoToken;
    }
    const auto found = whole_.find(std::string(piece));
    return found == whole_.end() ? kNoToken : found->second;
}

}  // namespace tessera::bpe

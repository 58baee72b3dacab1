// Byte-pair encoding of one piece of text: its bytes become tokens, and the pair of the lowest rank is merged
// until no pair is left. Linear-logarithmic in the piece, since a prompt may be one piece of a megabyte.
#pragma once

#include <array>
#include <cstdint>
#include <string_view>
#include <vector>

#include "types/model_config.h"

namespace tessera::bpe {

inline constexpr TokenId kNoToken = -1;

// Working memory of encode(), kept from piece to piece. One for a thread at a time.
struct MergeScratch {
    struct Symbol {
        TokenId token;  // kNoToken once merged into its left neighbour
        int32_t previous, next;
    };
    struct Candidate {
        int32_t rank;
        int32_t position;
        TokenId merged;
    };
    std::vector<Symbol> symbols;
    std::vector<Candidate> heap;
};

// Immutable once built.
class MergeTable {
  public:
    struct Merge {
        int32_t rank = INT32_MAX;
        TokenId merged = kNoToken;
    };

    MergeTable();
    void set_byte(unsigned char byte, TokenId token) { byte_tokens_[byte] = token; }
    // What stands for a byte without a token (kNoToken: nothing does); fuse: one for a run of such bytes.
    void set_unknown(TokenId token, bool fuse);
    void reserve(size_t merges);
    // A later rank of the same pair replaces an earlier one.
    void add(TokenId left, TokenId right, Merge merge);

    // Appends the tokens of the piece.
    void encode(std::string_view piece, MergeScratch& scratch, std::vector<TokenId>& out) const;

  private:
    struct Slot {
        uint64_t pair = kEmpty;
        Merge merge;
    };
    static constexpr uint64_t kEmpty = ~uint64_t{0};

    static uint64_t pair_of(TokenId left, TokenId right) {
        return uint64_t{static_cast<uint32_t>(left)} << 32 | static_cast<uint32_t>(right);
    }
    size_t slot_of(uint64_t pair) const { return (pair * 0x9E3779B97F4A7C15u) >> shift_; }
    const Merge& find(TokenId left, TokenId right) const;
    void grow(size_t slots);
    template <typename Push>
    void for_each_symbol(std::string_view piece, Push push) const;
    void encode_short(std::string_view piece, std::vector<TokenId>& out) const;
    void encode_long(std::string_view piece, MergeScratch& scratch, std::vector<TokenId>& out) const;

    std::array<TokenId, 256> byte_tokens_;
    TokenId unknown_ = kNoToken;
    bool fuse_unknown_ = false;
    std::vector<Slot> slots_;  // open addressing, a power of two, at most half full
    int shift_ = 0;
    size_t used_ = 0;
};

}  // namespace tessera::bpe

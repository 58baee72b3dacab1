#include "text/bpe/merges.h"

#include <algorithm>
#include <bit>

namespace tessera::bpe {
namespace {

// Up to here a scan for the lowest rank beats a heap; words are shorter than this, but for a few.
constexpr size_t kShortPiece = 48;
constexpr size_t kSlotsAtFirst = 64;
const MergeTable::Merge kNoMerge;

// std heap functions keep the largest in front: the lowest rank, and the leftmost of equals.
bool later(const MergeScratch::Candidate& a, const MergeScratch::Candidate& b) {
    return a.rank != b.rank ? a.rank > b.rank : a.position > b.position;
}

}  // namespace

MergeTable::MergeTable() {
    byte_tokens_.fill(kNoToken);
    grow(kSlotsAtFirst);
}

void MergeTable::set_unknown(TokenId token, bool fuse) {
    unknown_ = token;
    fuse_unknown_ = fuse;
}

void MergeTable::reserve(size_t merges) {
    const size_t slots = std::bit_ceil(2 * merges);
    if (slots > slots_.size()) {
        grow(slots);
    }
}

void MergeTable::grow(size_t slots) {
    std::vector<Slot> old(slots);
    old.swap(slots_);
    shift_ = 64 - std::countr_zero(slots);
    used_ = 0;
    for (const Slot& slot : old) {
        if (slot.pair != kEmpty) {
            add(static_cast<TokenId>(slot.pair >> 32), static_cast<TokenId>(slot.pair & 0xFFFFFFFFu),
                slot.merge);
        }
    }
}

void MergeTable::add(TokenId left, TokenId right, Merge merge) {
    if (2 * (used_ + 1) > slots_.size()) {
        grow(2 * slots_.size());
    }
    const uint64_t pair = pair_of(left, right);
    size_t slot = slot_of(pair);
    while (slots_[slot].pair != kEmpty && slots_[slot].pair != pair) {
        slot = (slot + 1) & (slots_.size() - 1);
    }
    used_ += slots_[slot].pair == kEmpty ? 1 : 0;
    slots_[slot] = {pair, merge};
}

const MergeTable::Merge& MergeTable::find(TokenId left, TokenId right) const {
    const uint64_t pair = pair_of(left, right);
    for (size_t slot = slot_of(pair);; slot = (slot + 1) & (slots_.size() - 1)) {
        if (slots_[slot].pair == pair) {
            return slots_[slot].merge;
        }
        if (slots_[slot].pair == kEmpty) {
            return kNoMerge;
        }
    }
}

template <typename Push>
void MergeTable::for_each_symbol(std::string_view piece, Push push) const {
    bool after_unknown = false;
    for (const char c : piece) {
        const TokenId token = byte_tokens_[static_cast<unsigned char>(c)];
        if (token != kNoToken) {
            push(token);
        } else if (unknown_ != kNoToken && !(fuse_unknown_ && after_unknown)) {
            push(unknown_);
        }
        after_unknown = token == kNoToken;
    }
}

void MergeTable::encode(std::string_view piece, MergeScratch& scratch, std::vector<TokenId>& out) const {
    if (piece.size() <= kShortPiece) {
        encode_short(piece, out);
    } else {
        encode_long(piece, scratch, out);
    }
}

void MergeTable::encode_short(std::string_view piece, std::vector<TokenId>& out) const {
    std::array<TokenId, kShortPiece> tokens;
    std::array<Merge, kShortPiece> merges;  // [i]: of tokens i and i + 1
    size_t count = 0;
    for_each_symbol(piece, [&](TokenId token) { tokens[count++] = token; });
    for (size_t i = 0; i + 1 < count; ++i) {
        merges[i] = find(tokens[i], tokens[i + 1]);
    }
    while (count > 1) {
        size_t best = 0;
        for (size_t i = 1; i + 1 < count; ++i) {
            best = merges[i].rank < merges[best].rank ? i : best;
        }
        if (merges[best].merged == kNoToken) {
            break;
        }
        tokens[best] = merges[best].merged;
        std::copy(tokens.begin() + best + 2, tokens.begin() + count, tokens.begin() + best + 1);
        std::copy(merges.begin() + best + 1, merges.begin() + count - 1, merges.begin() + best);
        --count;
        if (best + 1 < count) {
            merges[best] = find(tokens[best], tokens[best + 1]);
        }
        if (best > 0) {
            merges[best - 1] = find(tokens[best - 1], tokens[best]);
        }
    }
    out.insert(out.end(), tokens.begin(), tokens.begin() + count);
}

void MergeTable::encode_long(std::string_view piece, MergeScratch& scratch, std::vector<TokenId>& out) const {
    auto& symbols = scratch.symbols;
    auto& heap = scratch.heap;
    symbols.clear();
    heap.clear();
    for_each_symbol(piece, [&](TokenId token) {
        const auto at = static_cast<int32_t>(symbols.size());
        symbols.push_back({token, at - 1, at + 1});
    });
    if (symbols.empty()) {
        return;
    }
    symbols.back().next = -1;
    const auto offer = [&](int32_t left) {
        const Merge& merge = find(symbols[left].token, symbols[symbols[left].next].token);
        if (merge.merged != kNoToken) {
            heap.push_back({merge.rank, left, merge.merged});
            return true;
        }
        return false;
    };
    for (int32_t i = 0; symbols[i].next >= 0; ++i) {
        offer(i);
    }
    std::make_heap(heap.begin(), heap.end(), later);
    while (!heap.empty()) {
        std::pop_heap(heap.begin(), heap.end(), later);
        const MergeScratch::Candidate top = heap.back();
        heap.pop_back();
        MergeScratch::Symbol& left = symbols[top.position];
        // A candidate is stale when either of its tokens has been merged since.
        if (left.token == kNoToken || left.next < 0 ||
            find(left.token, symbols[left.next].token).merged != top.merged) {
            continue;
        }
        MergeScratch::Symbol& right = symbols[left.next];
        left.token = top.merged;
        left.next = right.next;
        right.token = kNoToken;
        if (left.next >= 0) {
            symbols[left.next].previous = top.position;
            if (offer(top.position)) {
                std::push_heap(heap.begin(), heap.end(), later);
            }
        }
        if (left.previous >= 0 && offer(left.previous)) {
            std::push_heap(heap.begin(), heap.end(), later);
        }
    }
    for (int32_t i = 0; i >= 0; i = symbols[i].next) {
        out.push_back(symbols[i].token);
    }
}

}  // namespace tessera::bpe

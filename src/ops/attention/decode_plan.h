// How decode attention is dealt to thread blocks: the arithmetic, shared by the kernels that do it on the
// device and by the model of it that the tests check.
//
// KV heads have equal work, so each gets an equal number of blocks, and one head's share is dealt alike for
// all: blocks of the same number read the heads of a page, which lie side by side, at about the same time.
//
// For a head, a sequence has tiles of 64 slots. A piece is a run of a sequence's tiles that one block
// attends. The sequences lie on a line, each as long as what it costs: its tiles and one unit. The line is
// cut into equal parts, one a block (bin): a sequence is one piece, unless a cut falls into it. A bin shares
// at most two sequences with others: it ends one that earlier bins began, and it begins one that later bins
// end.
//
// A sequence of one piece is written at once; the pieces of a split one leave partial results in slots. Of
// few pieces, the first one's block collects the others' results. Of many, the blocks of some others add up
// slices of the rows when they have attended their bins. All but the first piece of a split sequence are the
// first of their bin, and all but the last one are the last: no block has more than one sequence to collect
// and one to add, and none waits before it has left all its results.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <vector>

namespace tessera {

inline constexpr int32_t kDecodeTileSlots = 64;
// A bin's least share: at least 1, so that no bin inside a sequence is empty. A tile costs more than one more
// piece of many to be merged.
inline constexpr int32_t kDecodeShareMin = 1;

// Where a bin begins, at a border of a piece; it ends where the next one begins. In the form in which the
// device keeps it.
struct alignas(16) DecodeBin {
    int32_t sequence = 0;
    int32_t tile = 0;
    // Of the sequence that is cut at this bin's end, the number of pieces (else 0), and which of them the bin
    // has.
    int32_t pieces = 0;
    int32_t piece = 0;
};

struct DecodePiece {
    int32_t sequence = 0;
    int32_t begin = 0;  // tiles
    int32_t end = 0;    // of an empty row: 0
};

// position: of the first of q_len new tokens; < 0 = an empty row, which has no tiles.
constexpr int32_t decode_slots(int32_t position, int32_t q_len, int32_t first_slot, int32_t slots_max) {
    return position < 0 ? 0 : std::min(first_slot + position + q_len, slots_max);
}
constexpr int32_t decode_tiles(int32_t slots) {
    return (slots + kDecodeTileSlots - 1) / kDecodeTileSlots;
}

constexpr int32_t decode_cost(int32_t tiles) {
    return tiles + 1;
}

// Bins that get work, of a line of this length; the others are empty.
constexpr int32_t decode_bins_used(int64_t line, int32_t bins) {
    return static_cast<int32_t>(std::clamp<int64_t>(line / kDecodeShareMin, 1, bins));
}
// Where bin `bin` begins on the line.
constexpr int64_t decode_cut(int64_t line, int32_t used, int32_t bin) {
    return line * std::min(bin, used) / used;
}
// The last bin that begins before `end` on the line.
constexpr int32_t decode_last_bin(int64_t line, int32_t used, int64_t end) {
    return static_cast<int32_t>((end * used + line - 1) / line) - 1;
}

// The bin that begins `offset` units into a sequence of `tiles`.
constexpr DecodeBin decode_bin_at(int32_t sequence, int32_t tiles, int32_t offset) {
    const int32_t tile = std::max(offset - 1, 0);
    if (tile == tiles && offset > 0) {  // the border is the next sequence's begin
        return {.sequence = sequence + 1};
    }
    return {.sequence = sequence, .tile = tile};
}

// Numbers the pieces of a sequence, [begin, end) on the line, that is cut between bin `index` and
// the next one. A cut right after the sequence's first unit falls on no tile, hence before the sequence.
struct DecodeSpan {
    int64_t line = 0;  // length of the whole line
    int32_t used = 0;  // bins
    int64_t begin = 0;
    int64_t end = 0;
};
constexpr void decode_number_pieces(const DecodeSpan& span, int32_t index, DecodeBin& bin) {
    const int32_t first = decode_last_bin(span.line, span.used, span.begin + 2);
    bin.pieces = decode_last_bin(span.line, span.used, span.end) - first + 1;
    bin.piece = index - first;
}

constexpr bool decode_before(const DecodeBin& a, const DecodeBin& b) {
    return a.sequence != b.sequence ? a.sequence < b.sequence : a.tile < b.tile;
}
// The first piece from `place` on, of a sequence of `tiles`, and where the next one begins. `end` = of the
// bin.
constexpr DecodePiece decode_next_piece(int32_t tiles, const DecodeBin& end, DecodeBin& place) {
    const DecodePiece piece{place.sequence, place.tile, place.sequence == end.sequence ? end.tile : tiles};
    place.tile = piece.end == tiles ? 0 : piece.end;
    place.sequence += piece.end == tiles ? 1 : 0;
    return piece;
}

// ---- partial results

// Block `bin` * heads + head attends bin `bin` of head `head`.
struct DecodeBlock {
    int32_t bin = 0;
    int32_t head = 0;
    int32_t heads = 1;
    DecodeBin before;  // as the plan has it for the bin before; of the first bin: anything
    DecodeBin from;    // and for this one
};
// The pieces of a split sequence: the slots of their partial results, and which one this is.
struct DecodePieces {
    int32_t count = 1;  // 1: not split, no slots
    int32_t index = 0;
    int32_t first = 0;   // slot of the first piece
    int32_t second = 0;  // of the second one; the others follow in steps
    int32_t step = 1;
    constexpr int32_t slot(int32_t i) const { return i == 0 ? first : second + (i - 1) * step; }
};
// A block has two slots, the second one for the piece that begins its sequence.
constexpr DecodePieces decode_pieces_of(const DecodeBlock& block, int32_t tiles, const DecodePiece& piece) {
    if (piece.begin == 0 && piece.end == tiles) {
        return {};
    }
    const int32_t count = piece.begin == 0 ? block.from.pieces : block.before.pieces;
    const int32_t index = piece.begin == 0 ? block.from.piece : block.before.piece + 1;
    const int32_t first = 2 * ((block.bin - index) * block.heads + block.head) + 1;
    return {count, index, first, first - 1 + 2 * block.heads, 2 * block.heads};
}
constexpr int32_t decode_slots_of_plan(int32_t blocks) {
    return 2 * blocks;
}

// Up to so many pieces, the first one's block collects the results.
inline constexpr int32_t kDecodeCollected = 2;
inline constexpr int32_t kDecodeSlices = 4;  // of a row, each a quarter of the dimensions

// How many slices of a sequence of many pieces a block adds up at a time: it reads 9 pieces of each of 16, 36
// of 4, or 144 of one.
constexpr int32_t decode_slices_at_once(int32_t pieces) {
    return pieces <= 9 ? 16 : (pieces <= 36 ? 4 : 1);
}
// Which slices the block of one of the pieces adds up. As few blocks have some as can do it at once, since
// the others make room for the next kernel's; that of the first piece has none.
struct DecodeSlices {
    int32_t begin = 0;
    int32_t end = 0;
};
constexpr DecodeSlices decode_slices_of(const DecodePieces& all, int32_t slices) {
    if (all.count <= kDecodeCollected || all.index == 0) {
        return {};
    }
    const int32_t at_once = decode_slices_at_once(all.count);
    const int32_t others = all.count - 1;
    const int32_t adders = std::min(others, (slices + at_once - 1) / at_once);
    const auto begin_of = [&](int32_t other) { return other * adders / others * slices / adders; };
    return {begin_of(all.index - 1), begin_of(all.index)};
}

// ---- the model

struct DecodeLengths {
    int32_t bins = 1;
    std::span<const int32_t> tiles;  // of each sequence
};

// [bins + 1]
std::vector<DecodeBin> plan_decode(const DecodeLengths& lengths);
// In the order in which the bin attends them.
std::vector<DecodePiece> pieces_of_bin(const DecodeLengths& lengths, std::span<const DecodeBin> plan,
                                       int32_t bin);

}  // namespace tessera

// How decode attention is dealt to thread blocks: the arithmetic, shared by the kernels that do it on the
// device and by the model of it that the tests check.
//
// An item is one sequence for one KV head; it has tiles of 64 slots. A piece is a run of an item's tiles that
// one block attends. The items lie on a line, sequence by sequence, each as long as what it costs: its tiles
// and one unit for every piece. The line is cut into equal parts, one a block (bin):
//
//   balanced  An item is one piece, unless a cut falls into it. A bin has at most two parts of items that it
//             shares: it ends an item that earlier bins began, and it begins one that later bins end.
//   fixed     An item has pieces of a number of tiles that depends on its own length alone, and cuts move to
//             the next border of a piece. The order of every sum then does not depend on the batch.
//
// An item of one piece is written at once; the pieces of any other leave partial results in slots, which
// another kernel merges in ascending order.
#pragma once

#include <algorithm>
#include <cstdint>
#include <span>
#include <vector>

namespace tessera {

inline constexpr int32_t kDecodeTileSlots = 64;
// A bin's least share, so that tiny batches do not become pieces of one tile; at least 2, so that no bin
// inside an item is empty.
inline constexpr int32_t kDecodeShareMin = 2;
inline constexpr int32_t kDecodeFixedTilesMin = 16;
inline constexpr int32_t kDecodeFixedPiecesMax = 16;

enum class DecodeSplit : uint8_t { kBalanced, kFixed };

// A place on the line, at a border of a piece, in the form in which the device keeps it.
struct alignas(16) DecodeBin {
    int32_t sequence = 0;  // where the bin begins; it ends where the next begins
    int32_t head = 0;
    int32_t tile = 0;
    // Balanced: of the item that is cut at this bin's end, the number of pieces (else 0), and which of them
    // the bin has.
    int16_t pieces = 0;
    int16_t piece = 0;
};

struct DecodePiece {
    int32_t sequence = 0;
    int32_t head = 0;
    int32_t begin = 0;  // tiles
    int32_t end = 0;    // of an empty row: 0
    int32_t slot = -1;  // of its partial result; -1: the item's only piece
};

// position: of the first of q_len new tokens; < 0 = an empty row, which has no tiles.
constexpr int32_t decode_slots(int32_t position, int32_t q_len, int32_t first_slot, int32_t slots_max) {
    return position < 0 ? 0 : std::min(first_slot + position + q_len, slots_max);
}
constexpr int32_t decode_tiles(int32_t slots) {
    return (slots + kDecodeTileSlots - 1) / kDecodeTileSlots;
}

// Tiles of a piece that no cut shortens.
constexpr int32_t decode_piece_tiles(DecodeSplit split, int32_t tiles) {
    const int32_t share = (tiles + kDecodeFixedPiecesMax - 1) / kDecodeFixedPiecesMax;
    const int32_t least = split == DecodeSplit::kFixed ? kDecodeFixedTilesMin : 1;
    const int32_t want = split == DecodeSplit::kFixed ? share : tiles;
    return want < least ? least : want;
}
constexpr int32_t decode_pieces(DecodeSplit split, int32_t tiles) {
    const int32_t each = decode_piece_tiles(split, tiles);
    return std::max((tiles + each - 1) / each, 1);
}
constexpr int32_t decode_item_cost(DecodeSplit split, int32_t tiles) {
    return tiles + decode_pieces(split, tiles);
}

// Bins that get work, of a line of this length; the others are empty.
constexpr int32_t decode_bins_used(int64_t line, int32_t bins) {
    return static_cast<int32_t>(std::clamp<int64_t>(line / kDecodeShareMin, 1, bins));
}
// Where bin `bin` begins on the line.
constexpr int64_t decode_cut(int64_t line, int32_t used, int32_t bin) {
    return line * std::min(bin, used) / used;
}
// The tile at which a cut at `offset` of an item falls; `tiles` = at the item's end.
constexpr int32_t decode_cut_tile(DecodeSplit split, int32_t tiles, int32_t offset) {
    if (split == DecodeSplit::kBalanced) {
        return std::max(offset - 1, 0);
    }
    const int32_t each = decode_piece_tiles(split, tiles);
    const int32_t piece = (offset + (each + 1) / 2) / (each + 1);
    return std::min(piece * each, tiles);
}
// The last bin that begins before `end` on the line.
constexpr int32_t decode_last_bin(int64_t line, int32_t used, int64_t end) {
    return static_cast<int32_t>((end * used + line - 1) / line) - 1;
}

// Balanced: numbers the pieces of an item that is cut between bin `index` and the next one. A cut right after
// the item's first unit falls on no tile, hence before the item.
struct DecodeItemSpan {
    int64_t line = 0;  // length of the whole line
    int32_t used = 0;  // bins
    int64_t begin = 0;
    int64_t end = 0;
};
constexpr void decode_number_pieces(const DecodeItemSpan& item, int32_t index, DecodeBin& bin) {
    const int32_t first = decode_last_bin(item.line, item.used, item.begin + 2);
    bin.pieces = static_cast<int16_t>(decode_last_bin(item.line, item.used, item.end) - first + 1);
    bin.piece = static_cast<int16_t>(index - first);
}

// The bin's begin, from what lies at its cut: `offset` units into the item (sequence, head) of `tiles`.
struct DecodeCut {
    int32_t sequence = 0;
    int32_t head = 0;
    int32_t tiles = 0;
    int32_t offset = 0;
};
constexpr DecodeBin decode_bin_at(DecodeSplit split, int32_t heads, const DecodeCut& cut) {
    DecodeBin bin{cut.sequence, cut.head, decode_cut_tile(split, cut.tiles, cut.offset)};
    if (bin.tile == cut.tiles && cut.offset > 0) {  // the border is the next item's begin
        bin.tile = 0;
        bin.head = cut.head + 1 == heads ? 0 : cut.head + 1;
        bin.sequence += bin.head == 0 ? 1 : 0;
    }
    return bin;
}

// Where the partial result of a piece lies. Balanced: two slots a bin, the second for the piece that begins
// its item.
constexpr int32_t decode_slot(DecodeSplit split, int32_t heads, int32_t bin, int32_t tiles,
                              const DecodePiece& piece) {
    if (piece.begin == 0 && piece.end == tiles) {
        return -1;
    }
    if (split == DecodeSplit::kFixed) {
        return (piece.sequence * heads + piece.head) * kDecodeFixedPiecesMax +
               piece.begin / decode_piece_tiles(split, tiles);
    }
    return 2 * bin + (piece.begin == 0 ? 1 : 0);
}
constexpr int64_t decode_slots_of_plan(DecodeSplit split, int32_t bins, int64_t items) {
    return split == DecodeSplit::kFixed ? items * kDecodeFixedPiecesMax : int64_t{2} * bins;
}

// The first piece from `place` on, of an item of `tiles`, and where the next one begins. `end` = of the bin.
constexpr DecodePiece decode_next_piece(DecodeSplit split, int32_t heads, int32_t tiles, const DecodeBin& end,
                                        DecodeBin& place) {
    DecodePiece piece{place.sequence, place.head, place.tile, tiles, -1};
    if (place.sequence == end.sequence && place.head == end.head) {
        piece.end = end.tile;
    }
    piece.end = std::min(piece.end, place.tile + decode_piece_tiles(split, tiles));
    place.tile = piece.end;
    if (piece.end == tiles) {
        place.tile = 0;
        place.head = piece.head + 1 == heads ? 0 : piece.head + 1;
        place.sequence += place.head == 0 ? 1 : 0;
    }
    return piece;
}
constexpr bool decode_before(const DecodeBin& a, const DecodeBin& b) {
    return a.sequence != b.sequence ? a.sequence < b.sequence
           : a.head != b.head       ? a.head < b.head
                                    : a.tile < b.tile;
}

// ---- the model

struct DecodeBatch {
    DecodeSplit split = DecodeSplit::kBalanced;
    int32_t heads = 1;
    int32_t bins = 1;
    std::span<const int32_t> tiles;  // of each sequence
};

// [bins + 1]
std::vector<DecodeBin> plan_decode(const DecodeBatch& batch);
// In the order in which the bin attends them.
std::vector<DecodePiece> pieces_of_bin(const DecodeBatch& batch, std::span<const DecodeBin> plan,
                                       int32_t bin);

}  // namespace tessera

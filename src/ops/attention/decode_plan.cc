#include "ops/attention/decode_plan.h"

#include <cstddef>

namespace tessera {

std::vector<DecodeBin> plan_decode(const DecodeBatch& batch) {
    const auto sequences = static_cast<int32_t>(batch.tiles.size());
    std::vector<int64_t> begins{0};
    for (const int32_t tiles : batch.tiles) {
        begins.push_back(begins.back() + int64_t{batch.heads} * decode_item_cost(batch.split, tiles));
    }
    const int64_t line = begins.back();
    const int32_t used = decode_bins_used(line, batch.bins);
    std::vector<DecodeBin> plan;
    for (int32_t bin = 0; bin <= batch.bins; ++bin) {
        const int64_t at = decode_cut(line, used, bin);
        if (at == line) {
            plan.push_back({sequences, 0, 0});
            continue;
        }
        const auto after = std::upper_bound(begins.begin(), begins.end(), at);
        const auto sequence = static_cast<int32_t>(after - begins.begin()) - 1;
        const int32_t tiles = batch.tiles[static_cast<size_t>(sequence)];
        const int32_t cost = decode_item_cost(batch.split, tiles);
        const auto inside = static_cast<int32_t>(at - begins[static_cast<size_t>(sequence)]);
        const DecodeCut cut{sequence, inside / cost, tiles, inside % cost};
        plan.push_back(decode_bin_at(batch.split, batch.heads, cut));
        if (bin > 0 && batch.split == DecodeSplit::kBalanced && plan.back().tile > 0) {
            const int64_t begin = at - cut.offset;
            decode_number_pieces({line, used, begin, begin + cost}, bin - 1,
                                 plan[static_cast<size_t>(bin) - 1]);
        }
    }
    return plan;
}

std::vector<DecodePiece> pieces_of_bin(const DecodeBatch& batch, std::span<const DecodeBin> plan,
                                       int32_t bin) {
    std::vector<DecodePiece> pieces;
    DecodeBin place = plan[static_cast<size_t>(bin)];
    const DecodeBin& end = plan[static_cast<size_t>(bin) + 1];
    while (decode_before(place, end)) {
        const int32_t tiles = batch.tiles[static_cast<size_t>(place.sequence)];
        DecodePiece piece = decode_next_piece(batch.split, batch.heads, tiles, end, place);
        piece.slot = decode_slot(batch.split, batch.heads, bin, tiles, piece);
        pieces.push_back(piece);
    }
    return pieces;
}

}  // namespace tessera

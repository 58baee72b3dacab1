#include "ops/attention/decode_plan.h"

#include <cstddef>

namespace tessera {

std::vector<DecodeBin> plan_decode(const DecodeLengths& lengths) {
    const auto sequences = static_cast<int32_t>(lengths.tiles.size());
    std::vector<int64_t> begins{0};
    for (const int32_t tiles : lengths.tiles) {
        begins.push_back(begins.back() + decode_cost(tiles));
    }
    const int64_t line = begins.back();
    const int32_t used = decode_bins_used(line, lengths.bins);
    std::vector<DecodeBin> plan;
    for (int32_t bin = 0; bin <= lengths.bins; ++bin) {
        const int64_t at = decode_cut(line, used, bin);
        if (at == line) {
            plan.push_back({.sequence = sequences});
            continue;
        }
        const auto after = std::upper_bound(begins.begin(), begins.end(), at) - begins.begin();
        const auto sequence = static_cast<size_t>(after) - 1;
        plan.push_back(decode_bin_at(static_cast<int32_t>(sequence), lengths.tiles[sequence],
                                     static_cast<int32_t>(at - begins[sequence])));
        if (plan.back().tile > 0) {
            decode_number_pieces({line, used, begins[sequence], begins[sequence + 1]}, bin - 1,
                                 plan[static_cast<size_t>(bin) - 1]);
        }
    }
    return plan;
}

std::vector<DecodePiece> pieces_of_bin(const DecodeLengths& lengths, std::span<const DecodeBin> plan,
                                       int32_t bin) {
    std::vector<DecodePiece> pieces;
    DecodeBin place = plan[static_cast<size_t>(bin)];
    const DecodeBin& end = plan[static_cast<size_t>(bin) + 1];
    while (decode_before(place, end)) {
        pieces.push_back(decode_next_piece(lengths.tiles[static_cast<size_t>(place.sequence)], end, place));
    }
    return pieces;
}

}  // namespace tessera

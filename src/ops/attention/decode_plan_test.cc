#include "ops/attention/decode_plan.h"

#include <cmath>
#include <cstdio>
#include <gtest/gtest.h>
#include <map>
#include <rapidcheck/gtest.h>
#include <tuple>

namespace tessera {
namespace {

struct Lengths {
    std::vector<int32_t> tiles;
    int32_t heads = 1;
    int32_t bins = 1;
    DecodeBatch batch(DecodeSplit split) const { return {split, heads, bins, tiles}; }
};

Lengths any_lengths() {
    const auto tiles = *rc::gen::oneOf(rc::gen::inRange(0, 4), rc::gen::inRange(0, 80), rc::gen::just(64),
                                       rc::gen::inRange(900, 4097));
    Lengths lengths{{}, *rc::gen::element(1, 2, 4, 8), *rc::gen::element(1, 2, 7, 132, 264, 396)};
    const int count = *rc::gen::inRange(1, 130);
    const bool equal = *rc::gen::arbitrary<bool>();
    for (int i = 0; i < count; ++i) {
        lengths.tiles.push_back(equal ? tiles
                                      : *rc::gen::oneOf(rc::gen::inRange(0, 80), rc::gen::inRange(0, 1100)));
    }
    return lengths;
}

// Every tile of every item in exactly one piece, in ascending order; an item without tiles in one empty
// piece.
void check_cover(const DecodeBatch& batch, const std::vector<DecodeBin>& plan) {
    int32_t sequence = 0;
    int32_t head = 0;
    int32_t tile = 0;
    for (int32_t bin = 0; bin < batch.bins; ++bin) {
        for (const DecodePiece& piece : pieces_of_bin(batch, plan, bin)) {
            const int32_t tiles = batch.tiles[static_cast<size_t>(sequence)];
            RC_ASSERT(std::tie(piece.sequence, piece.head, piece.begin) == std::tie(sequence, head, tile));
            RC_ASSERT(piece.end > tile || (tiles == 0 && piece.end == 0));
            RC_ASSERT(piece.end <= tiles);
            RC_ASSERT((piece.slot < 0) == (piece.begin == 0 && piece.end == tiles));
            tile = piece.end == tiles ? 0 : piece.end;
            head += tile == 0 ? 1 : 0;
            sequence += head == batch.heads ? 1 : 0;
            head %= batch.heads;
        }
    }
    RC_ASSERT(sequence == static_cast<int32_t>(batch.tiles.size()));
}

using Item = std::pair<int32_t, int32_t>;  // sequence, head

// The slots of each split item, in the order of its pieces; no slot is used twice.
std::map<Item, std::vector<int32_t>> slots_of(const DecodeBatch& batch, const std::vector<DecodeBin>& plan) {
    std::map<Item, std::vector<int32_t>> slots;
    std::vector<bool> used(static_cast<size_t>(decode_slots_of_plan(
        batch.split, batch.bins, static_cast<int64_t>(batch.tiles.size()) * batch.heads)));
    for (int32_t bin = 0; bin < batch.bins; ++bin) {
        for (const DecodePiece& piece : pieces_of_bin(batch, plan, bin)) {
            if (piece.slot >= 0) {
                RC_ASSERT(static_cast<size_t>(piece.slot) < used.size() &&
                          !used[static_cast<size_t>(piece.slot)]);
                used[static_cast<size_t>(piece.slot)] = true;
                slots[{piece.sequence, piece.head}].push_back(piece.slot);
            }
        }
    }
    return slots;
}

// What a bin costs: its tiles and one for each piece.
std::vector<int32_t> loads_of(const DecodeBatch& batch, const std::vector<DecodeBin>& plan) {
    std::vector<int32_t> loads;
    for (int32_t bin = 0; bin < batch.bins; ++bin) {
        int32_t load = 0;
        for (const DecodePiece& piece : pieces_of_bin(batch, plan, bin)) {
            load += piece.end - piece.begin + 1;
        }
        loads.push_back(load);
    }
    return loads;
}

int64_t line_of(const DecodeBatch& batch) {
    int64_t line = 0;
    for (const int32_t tiles : batch.tiles) {
        line += int64_t{batch.heads} * decode_item_cost(batch.split, tiles);
    }
    return line;
}

RC_GTEST_PROP(DecodePlan, every_tile_lies_in_exactly_one_piece, ()) {
    const Lengths lengths = any_lengths();
    for (const DecodeSplit split : {DecodeSplit::kBalanced, DecodeSplit::kFixed}) {
        const DecodeBatch batch = lengths.batch(split);
        check_cover(batch, plan_decode(batch));
    }
}

RC_GTEST_PROP(DecodePlan, no_bin_is_more_than_one_tile_above_an_even_share, ()) {
    const Lengths lengths = any_lengths();
    const DecodeBatch batch = lengths.batch(DecodeSplit::kBalanced);
    const std::vector<int32_t> loads = loads_of(batch, plan_decode(batch));
    const int64_t line = line_of(batch);
    const int32_t used = decode_bins_used(line, batch.bins);
    for (int32_t bin = 0; bin < batch.bins; ++bin) {
        const int32_t load = loads[static_cast<size_t>(bin)];
        RC_ASSERT(load <= (line + used - 1) / used + 1);  // a bin that begins inside an item has a piece more
        RC_ASSERT(bin >= used || load >= line / used - 1);
        RC_ASSERT(bin < used || load == 0);
    }
}

RC_GTEST_PROP(DecodePlan, the_merge_finds_the_slots_of_every_split_item, ()) {
    const Lengths lengths = any_lengths();
    const DecodeBatch batch = lengths.batch(DecodeSplit::kBalanced);
    const std::vector<DecodeBin> plan = plan_decode(batch);
    std::map<Item, std::vector<int32_t>> merged;
    for (int32_t bin = 0; bin < batch.bins; ++bin) {
        const DecodeBin& from = plan[static_cast<size_t>(bin)];
        if (from.pieces > 0) {
            RC_ASSERT(from.pieces >= 2 && from.piece >= 0 && from.piece < from.pieces - 1);
            const DecodeBin& next = plan[static_cast<size_t>(bin) + 1];
            std::vector<int32_t> slots;
            for (int32_t i = 0; i < from.pieces; ++i) {
                slots.push_back(2 * (bin - from.piece + i) + (i == 0 ? 1 : 0));
            }
            const auto [entry, is_new] = merged.insert({{next.sequence, next.head}, slots});
            RC_ASSERT(is_new == (from.piece == 0));
            RC_ASSERT(entry->second == slots);
        }
    }
    RC_ASSERT(merged == slots_of(batch, plan));
}

RC_GTEST_PROP(DecodePlan, fixed_pieces_depend_on_the_own_length_alone, ()) {
    const Lengths lengths = any_lengths();
    const DecodeBatch batch = lengths.batch(DecodeSplit::kFixed);
    const std::vector<DecodeBin> plan = plan_decode(batch);
    for (int32_t bin = 0; bin < batch.bins; ++bin) {
        for (const DecodePiece& piece : pieces_of_bin(batch, plan, bin)) {
            const int32_t tiles = batch.tiles[static_cast<size_t>(piece.sequence)];
            const int32_t each = decode_piece_tiles(DecodeSplit::kFixed, tiles);
            RC_ASSERT(piece.begin % each == 0);
            RC_ASSERT(piece.end == std::min(piece.begin + each, tiles));
        }
    }
    for (const auto& [item, slots] : slots_of(batch, plan)) {
        const int32_t tiles = batch.tiles[static_cast<size_t>(item.first)];
        const int32_t first = (item.first * batch.heads + item.second) * kDecodeFixedPiecesMax;
        RC_ASSERT(static_cast<int32_t>(slots.size()) == decode_pieces(DecodeSplit::kFixed, tiles));
        for (size_t i = 0; i < slots.size(); ++i) {
            RC_ASSERT(slots[i] == first + static_cast<int32_t>(i));
        }
    }
}

TEST(DecodePlan, an_unsplit_batch_needs_no_merge) {
    const std::vector<int32_t> tiles(264, 64);
    const DecodeBatch batch{DecodeSplit::kBalanced, 1, 264, tiles};
    for (const DecodeBin& bin : plan_decode(batch)) {
        EXPECT_EQ(bin.tile, 0);
        EXPECT_EQ(bin.pieces, 0);
    }
}

TEST(DecodePlan, slots_end_at_the_limit_and_empty_rows_have_none) {
    EXPECT_EQ(decode_slots(-1, 4, 1, 4096), 0);
    EXPECT_EQ(decode_slots(0, 1, 0, 4096), 1);
    EXPECT_EQ(decode_slots(63, 2, 1, 4096), 66);
    EXPECT_EQ(decode_slots(4095, 4, 0, 4096), 4096);
    EXPECT_EQ(decode_tiles(0), 0);
    EXPECT_EQ(decode_tiles(65), 2);
}

// The deviation of tiles over bins, of the mean: of the mixes that the operator's README names.
TEST(DecodePlan, tiles_of_bins_deviate_by_less_than_5_percent) {
    std::vector<int32_t> mixed(16, 64);
    mixed[0] = 1024;
    std::vector<int32_t> skewed(64, 8);
    for (size_t i = 0; i < skewed.size(); i += 8) {
        skewed[i] = 256;
    }
    const std::vector<std::pair<const char*, std::vector<int32_t>>> mixes = {
        {"64 x 4,096", std::vector<int32_t>(64, 64)},
        {"1 x 65,536 + 15 x 4,096", mixed},
        {"8 x 16,384 + 56 x 512", skewed},
        {"1 x 262,144", {4096}}};
    for (const auto& [name, tiles] : mixes) {
        const DecodeBatch batch{DecodeSplit::kBalanced, 8, 264, tiles};
        const std::vector<int32_t> loads = loads_of(batch, plan_decode(batch));
        double mean = 0;
        double square = 0;
        for (const int32_t load : loads) {
            mean += load / 264.0;
            square += static_cast<double>(load) * load / 264.0;
        }
        const double deviation = std::sqrt(square - mean * mean) / mean;
        std::printf("%s, 8 heads: mean load %.1f tiles, deviation %.2f %%\n", name, mean, deviation * 100);
        EXPECT_LT(deviation, 0.05) << name;
    }
}

}  // namespace
}  // namespace tessera

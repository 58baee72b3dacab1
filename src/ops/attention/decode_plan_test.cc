#include "ops/attention/decode_plan.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <gtest/gtest.h>
#include <map>
#include <rapidcheck/gtest.h>
#include <string>
#include <utility>

namespace tessera {
namespace {

struct AnyLengths {
    std::vector<int32_t> tiles;
    int32_t bins = 1;
    DecodeLengths all() const { return {bins, tiles}; }
};

AnyLengths any_lengths() {
    const auto tiles = *rc::gen::oneOf(rc::gen::inRange(0, 4), rc::gen::inRange(0, 80), rc::gen::just(64),
                                       rc::gen::inRange(900, 4097));
    AnyLengths lengths{{}, *rc::gen::element(1, 2, 7, 33, 132, 264, 396)};
    const int kind = *rc::gen::inRange(0, 3);  // equal, mixed, and many short ones
    const int count = *rc::gen::inRange(1, kind == 2 ? 1025 : 130);
    for (int i = 0; i < count; ++i) {
        const auto mixed = kind == 1 ? rc::gen::oneOf(rc::gen::inRange(0, 80), rc::gen::inRange(0, 1100))
                                     : rc::gen::inRange(0, 4);
        lengths.tiles.push_back(kind == 0 ? tiles : *mixed);
    }
    return lengths;
}

// Every tile of every sequence in exactly one piece, in ascending order; no tiles: one empty piece.
void check_cover(const DecodeLengths& lengths, const std::vector<DecodeBin>& plan) {
    int32_t sequence = 0;
    int32_t tile = 0;
    for (int32_t bin = 0; bin < lengths.bins; ++bin) {
        for (const DecodePiece& piece : pieces_of_bin(lengths, plan, bin)) {
            const int32_t tiles = lengths.tiles[static_cast<size_t>(sequence)];
            RC_ASSERT(piece.sequence == sequence && piece.begin == tile && piece.end <= tiles);
            RC_ASSERT(piece.end > tile || tiles == 0);
            tile = piece.end == tiles ? 0 : piece.end;
            sequence += tile == 0 ? 1 : 0;
        }
    }
    RC_ASSERT(sequence == static_cast<int32_t>(lengths.tiles.size()));
}

// What a bin costs: its tiles and one for each piece.
std::vector<int32_t> loads_of(const DecodeLengths& lengths, const std::vector<DecodeBin>& plan) {
    std::vector<int32_t> loads;
    for (int32_t bin = 0; bin < lengths.bins; ++bin) {
        int32_t load = 0;
        for (const DecodePiece& piece : pieces_of_bin(lengths, plan, bin)) {
            load += piece.end - piece.begin + 1;
        }
        loads.push_back(load);
    }
    return loads;
}

int64_t line_of(const DecodeLengths& lengths) {
    int64_t line = 0;
    for (const int32_t tiles : lengths.tiles) {
        line += decode_cost(tiles);
    }
    return line;
}

RC_GTEST_PROP(DecodePlan, every_tile_lies_in_exactly_one_piece, ()) {
    const AnyLengths any = any_lengths();
    check_cover(any.all(), plan_decode(any.all()));
}

RC_GTEST_PROP(DecodePlan, no_bin_is_more_than_one_tile_above_an_even_share, ()) {
    const AnyLengths any = any_lengths();
    const DecodeLengths lengths = any.all();
    const std::vector<int32_t> loads = loads_of(lengths, plan_decode(lengths));
    const int64_t line = line_of(lengths);
    const int32_t used = decode_bins_used(line, lengths.bins);
    for (int32_t bin = 0; bin < lengths.bins; ++bin) {
        const int32_t load = loads[static_cast<size_t>(bin)];
        RC_ASSERT(load <=
                  (line + used - 1) / used + 1);  // a bin that begins inside a sequence has a piece more
        RC_ASSERT(bin >= used || load >= line / used - 1);
        RC_ASSERT(bin < used || load == 0);
    }
}

// Every piece of a split sequence knows the same slots for all of them and its own place among them, and no
// slot is used twice.
RC_GTEST_PROP(DecodePlan, pieces_agree_on_the_slots_of_a_split_sequence, ()) {
    const AnyLengths any = any_lengths();
    const int32_t heads = *rc::gen::element(1, 2, 4, 8);
    const int32_t head = *rc::gen::inRange(0, heads);
    const DecodeLengths lengths = any.all();
    const std::vector<DecodeBin> plan = plan_decode(lengths);
    std::map<int32_t, std::pair<std::vector<int32_t>, int32_t>> slots;  // and pieces seen
    std::vector<bool> used(static_cast<size_t>(decode_slots_of_plan(lengths.bins * heads)));
    for (int32_t bin = 0; bin < lengths.bins; ++bin) {
        const DecodeBin before = bin > 0 ? plan[static_cast<size_t>(bin) - 1] : DecodeBin{};
        for (const DecodePiece& piece : pieces_of_bin(lengths, plan, bin)) {
            const DecodeBlock block{bin, head, heads, before, plan[static_cast<size_t>(bin)]};
            const DecodePieces all =
                decode_pieces_of(block, lengths.tiles[static_cast<size_t>(piece.sequence)], piece);
            if (all.count == 1) {
                continue;
            }
            std::vector<int32_t> want;
            for (int32_t i = 0; i < all.count; ++i) {
                want.push_back(all.slot(i));
            }
            auto& [known, seen] = slots.insert({piece.sequence, {want, 0}}).first->second;
            RC_ASSERT(known == want && all.index == seen);
            const auto own = static_cast<size_t>(all.slot(all.index));
            RC_ASSERT(own < used.size() && !used[own]);
            used[own] = true;
            seen += 1;
        }
    }
    for (const auto& [sequence, entry] : slots) {
        RC_ASSERT(entry.second == static_cast<int32_t>(entry.first.size()));
    }
}

// Who adds up a sequence has left all results of its own: a piece that continues a sequence is the first of
// its bin, so a block has one sequence to add, and one that others follow is the last.
RC_GTEST_PROP(DecodePlan, pieces_that_continue_a_sequence_begin_their_bin, ()) {
    const AnyLengths any = any_lengths();
    const DecodeLengths lengths = any.all();
    const std::vector<DecodeBin> plan = plan_decode(lengths);
    for (int32_t bin = 0; bin < lengths.bins; ++bin) {
        const std::vector<DecodePiece> pieces = pieces_of_bin(lengths, plan, bin);
        for (size_t i = 0; i < pieces.size(); ++i) {
            const int32_t tiles = lengths.tiles[static_cast<size_t>(pieces[i].sequence)];
            RC_ASSERT(pieces[i].begin == 0 || i == 0);
            RC_ASSERT(pieces[i].end == tiles || i + 1 == pieces.size());
        }
    }
}

RC_GTEST_PROP(DecodePlan, every_slice_of_many_pieces_is_added_once, ()) {
    const int32_t count = *rc::gen::oneOf(rc::gen::inRange(2, 50), rc::gen::inRange(2, 400));
    const int32_t slices = *rc::gen::inRange(1, 33) * kDecodeSlices;
    int32_t next = 0;
    for (int32_t i = 0; i < count; ++i) {
        const DecodeSlices mine = decode_slices_of({.count = count, .index = i}, slices);
        RC_ASSERT(mine.end >= mine.begin);
        if (mine.end > mine.begin) {
            RC_ASSERT(i > 0 && mine.begin == next);
            next = mine.end;
        }
    }
    RC_ASSERT(next == (count <= kDecodeCollected ? 0 : slices));
}

TEST(DecodePlan, a_batch_that_fits_is_not_split) {
    const std::vector<int32_t> tiles(264, 64);
    for (const DecodeBin& bin : plan_decode({264, tiles})) {
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

struct Deviation {
    double mean = 0;
    double units = 0;  // standard deviation; a unit is what a tile costs
};
Deviation deviation_of(const std::vector<int32_t>& loads) {
    const auto count = static_cast<double>(loads.size());
    Deviation deviation;
    for (const int32_t load : loads) {
        deviation.mean += load / count;
    }
    double square = 0;
    for (const int32_t load : loads) {
        square += (load - deviation.mean) * (load - deviation.mean) / count;
    }
    deviation.units = std::sqrt(square);
    return deviation;
}

// A piece costs a unit in these loads, though the line has one for each sequence alone. A bin has at most one
// piece more than sequences begin in it, so no assignment of whole tiles has a largest load that is smaller
// by more than a unit.
RC_GTEST_PROP(DecodePlan, a_cut_makes_one_piece_and_no_other_plan_is_a_unit_better, ()) {
    const AnyLengths any = any_lengths();
    const DecodeLengths lengths = any.all();
    const std::vector<DecodeBin> plan = plan_decode(lengths);
    const std::vector<int32_t> loads = loads_of(lengths, plan);
    const int64_t line = line_of(lengths);
    const int32_t used = decode_bins_used(line, lengths.bins);
    size_t pieces = 0;
    int32_t cuts = 0;
    bool has_tiles = false;
    for (int32_t bin = 0; bin < lengths.bins; ++bin) {
        pieces += pieces_of_bin(lengths, plan, bin).size();
        cuts += plan[static_cast<size_t>(bin)].tile > 0 ? 1 : 0;
    }
    for (const int32_t tiles : lengths.tiles) {
        has_tiles = has_tiles || tiles > 0;
    }
    RC_ASSERT(cuts <= used - 1);
    RC_ASSERT(pieces == lengths.tiles.size() + static_cast<size_t>(cuts));
    // Of all assignments: the even share, rounded up, and a tile with its piece.
    const int64_t best = std::max<int64_t>((line + lengths.bins - 1) / lengths.bins, has_tiles ? 2 : 1);
    RC_ASSERT(*std::max_element(loads.begin(), loads.end()) <= best + 1);
}

// A load lies between one unit below the even share, rounded down, and one above it, rounded up: at most
// three units apart, hence a deviation of at most 1.5, whatever the lengths.
RC_GTEST_PROP(DecodePlan, loads_deviate_by_at_most_one_and_a_half_units, ()) {
    const AnyLengths any = any_lengths();
    const DecodeLengths lengths = any.all();
    RC_PRE(line_of(lengths) >= lengths.bins);  // otherwise some bins are empty
    const Deviation deviation = deviation_of(loads_of(lengths, plan_decode(lengths)));
    RC_ASSERT(deviation.units <= 1.5 + 1e-6);
    RC_ASSERT(deviation.mean < 30 || deviation.units <= 0.05 * deviation.mean + 1e-6);
}

struct Mix {
    std::string name;
    std::vector<int32_t> tiles;
};
std::vector<Mix> mixes_of_readme() {
    std::vector<Mix> mixes = {{"64 x 4,096", std::vector<int32_t>(64, 64)},
                              {"1 x 65,536 + 15 x 4,096", std::vector<int32_t>(16, 64)},
                              {"8 x 16,384 + 56 x 512", std::vector<int32_t>(64, 8)},
                              {"1 x 262,144", {4096}},
                              {"64 x 1,024", std::vector<int32_t>(64, 16)},
                              {"16 x 4,096", std::vector<int32_t>(16, 64)},
                              {"16 x 32,768", std::vector<int32_t>(16, 512)},
                              {"128 x 4,096", std::vector<int32_t>(128, 64)},
                              {"512 x 128", std::vector<int32_t>(512, 2)},
                              {"64 x 100 to 3,943", {}},
                              {"256 x 64 to 65,536", {}}};
    mixes[1].tiles[0] = 1024;
    for (size_t i = 0; i < 64; i += 8) {
        mixes[2].tiles[i] = 256;
    }
    for (int32_t i = 0; i < 64; ++i) {
        mixes[9].tiles.push_back(decode_tiles(100 + 61 * i));
    }
    for (int32_t i = 0; i < 256; ++i) {
        mixes[10].tiles.push_back(
            decode_tiles(static_cast<int32_t>(std::round(64 * std::pow(1024.0, i / 255.0)))));
    }
    return mixes;
}

// Of the mixes in the README of the operator's CUDA part: within a unit of an even share, and under 5 % from
// 20 units a bin on.
TEST(DecodePlan, loads_of_bins_deviate_by_less_than_5_percent_where_a_tile_is_a_twentieth) {
    for (const Mix& mix : mixes_of_readme()) {
        std::printf("%-24s", mix.name.c_str());
        for (const int bins : {32, 64, 128, 256}) {  // a head of an H200 with 8, 4, 2 KV heads and one
            const DecodeLengths lengths{bins, mix.tiles};
            const std::vector<int32_t> loads = loads_of(lengths, plan_decode(lengths));
            const Deviation deviation = deviation_of(loads);
            const double percent = deviation.units / deviation.mean * 100;
            std::printf(" | %5.1f %% of %6.1f", percent, deviation.mean);
            const int64_t share = (line_of(lengths) + bins - 1) / bins;
            EXPECT_LE(*std::max_element(loads.begin(), loads.end()), share + 1) << mix.name << ", " << bins;
            EXPECT_LE(deviation.units, 1 + 1e-6) << mix.name << ", " << bins;
            if (deviation.mean >= 20) {
                EXPECT_LT(percent, 5) << mix.name << ", " << bins;
            }
        }
        std::printf("\n");
    }
}

}  // namespace
}  // namespace tessera

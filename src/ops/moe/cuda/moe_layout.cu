#include <algorithm>

#include "ops/moe/cuda/experts_grouped.h"
#include "ops/moe/cuda/moe_layout.h"

namespace tessera::cuda {
namespace {

// Grouped: from here on x is copied into the order of the rows. Rows an expert, and outputs that hide the
// copy.
constexpr int64_t kSortedMean = 128;
constexpr int64_t kSortedWidth = 512;

// int4: two blocks a multiprocessor up to here, rows an expert: with tiles of as many rows of weights as else
// if experts are narrow, so that tiles of down are short, or gate and up are some rounds of the blocks
// (outputs of all experts); with half as many otherwise.
constexpr int64_t kW4FewMean = 28;
constexpr int64_t kW4PairMean = 12;
constexpr int64_t kW4FewOutputs = 1 << 17;

// e4m3 blocks: two blocks a multiprocessor up to here, rows an expert.
constexpr int64_t kW8PairMean = 24;

// int4: wide tiles from here on, rows an expert and (token, expert) pairs.
constexpr int64_t kW4WideMean = 112;
constexpr int64_t kW4WidePairs = 8192;

int choose_w4_tile(const MoeCudaTensors& tensors, int64_t mean, int64_t pairs) {
    if (mean <= kW4FewMean &&
        (tensors.width < kSortedWidth || tensors.experts * tensors.width >= kW4FewOutputs)) {
        return kW4FewTile;
    }
    if (mean <= kW4PairMean) {
        return kW4PairTile;
    }
    return mean >= kW4WideMean && pairs >= kW4WidePairs ? kW4WideTile : kW4BroadTile;
}

int choose_tile_max(const MoeCudaTensors& tensors, int64_t tokens, int64_t k) {
    const int64_t experts = tensors.experts;
    const int64_t mean = experts > 0 ? tokens * k / experts : tokens;
    if (tensors.grouped()) {
        return tensors.dtype == DType::kInt4 ? choose_w4_tile(tensors, mean, tokens * k)
               : mean <= kW8PairMean         ? kW8PairTile
                                             : kW8WideTile;
    }
    const int64_t middle = experts > 0 ? 48 : MiddleShape::kTileMax;
    // Its down tiles would be too small.
    const bool narrow = !is_short(std::max(tensors.width, tensors.shared_width), dtype_size(tensors.dtype));
    return mean <= 12 && narrow ? NarrowShape::kTileMax
           : mean <= middle     ? MiddleShape::kTileMax
                                : WideShape::kTileMax;
}

// Where experts have fewer rows, many have none, and what is asked for early would be of no use.
constexpr int64_t kEarlyMean = 2;

// Rows of an item of the shared expert, at most tile_max and as equal as steps of 16 allow. The tiles of a
// dense layer are few and long: there the blocks' last round counts as well.
int64_t shared_item_rows(const MoeCudaTensors& tensors, int64_t tokens, int64_t tile_max, int64_t sm_count) {
    const auto rows_of = [tokens](int64_t items) { return round_up((tokens + items - 1) / items, 16); };
    const int64_t fewest = (tokens + tile_max - 1) / tile_max;
    if (tensors.experts > 0 || tile_max < WideShape::kTileMax) {
        return rows_of(fewest);
    }
    const auto rounds = [sm_count](int64_t tiles) { return (tiles + sm_count - 1) / sm_count; };
    const int64_t gate_tiles = (tensors.shared_width + WideShape::kOutputs - 1) / WideShape::kOutputs;
    const int64_t down_tiles = (tensors.hidden + WideShape::kWeightRows - 1) / WideShape::kWeightRows;
    int64_t best = 0;
    int64_t best_cost = 0;
    for (int64_t items = fewest; items <= 2 * fewest; ++items) {
        const int64_t rows = rows_of(items);
        const int64_t cost = rows * (rounds(items * gate_tiles) * tensors.hidden +
                                     rounds(items * down_tiles) * tensors.shared_width);
        if (best == 0 || cost < best_cost) {
            best = rows;
            best_cost = cost;
        }
    }
    return best;
}

// Up to so many rounds of the blocks' gate and up tiles 192 rows of weights are better than 256: the last
// round weighs more (H200: 24 experts of 1536, 2.9 rounds, 43 rows each, 121.8 us, 125.4 by 256; 192 experts
// 900, 889).
constexpr int64_t kFewRounds = 4;

// Routed experts with many rows, or some rows and few experts; e4m3.
bool takes_thirds(const MoeCudaTensors& t, int64_t pairs, int tile_max, int64_t sm_count) {
    if (t.dtype != DType::kFloat8E4M3 || t.grouped() || t.experts == 0 || pairs == 0) {
        return false;
    }
    const int64_t tiles = t.experts * ((t.width + ExpertsThirds::kOutputs - 1) / ExpertsThirds::kOutputs);
    return tile_max == WideShape::kTileMax ||
           (tile_max == ExpertsShortThirds::kTileMax &&
            !is_short(std::max(t.width, t.shared_width), dtype_size(t.dtype)) &&
            tiles <= kFewRounds * sm_count);
}
// How many experts' first items are the first routed ones: as many as the blocks' first tiles reach, if
// nearly all experts have tokens, and one item each, since neighbours share their weights. Grouped: none, its
// blocks wait for the tokens in e4m3 as well. Where each block makes the plan, its code would wait behind
// these weights.
int64_t early_items(const MoeCudaTensors& t, const MoeLayout& layout, int64_t sm_count) {
    if (t.grouped() || t.experts == 0 || t.width == 0 || layout.routed_rows < kEarlyMean * t.experts ||
        layout.routed_rows > layout.tile_max * t.experts ||
        plans_itself(t, layout.routed_rows, layout.tile_max)) {
        return 0;
    }
    const int64_t shared_tiles = layout.shared_items * gate_tiles(layout, t.shared_width);
    const int64_t left = std::max<int64_t>(sm_count - shared_tiles, 0);
    return std::min(t.experts, left / gate_tiles(layout, t.width));
}

}  // namespace

bool is_short(int64_t width, int64_t value_bytes) {
    return width * value_bytes <= 4 * kSwizzleRowBytes;
}

int64_t round_up(int64_t value, int64_t to) {
    return (value + to - 1) / to * to;
}

int64_t gate_tiles(const MoeLayout& layout, int64_t width) {
    static_assert(MiddleShape::kOutputs == WideShape::kOutputs);
    const int64_t outputs = layout.thirds                              ? ExpertsThirds::kOutputs
                            : layout.tile_max == NarrowShape::kTileMax ? NarrowShape::kOutputs
                                                                       : MiddleShape::kOutputs;
    return (width + outputs - 1) / outputs;
}

bool plans_itself(const MoeCudaTensors& t, int64_t pairs, int tile_max) {
    return !t.grouped() && t.experts > 0 && t.experts <= kOwnExperts && pairs > 0 && pairs <= kOwnPairs &&
           tile_max <= MiddleShape::kTileMax;
}

MoeCudaTensors shared_tensors(const MoeCudaTensors& tensors) {
    MoeCudaTensors shared = tensors;
    shared.dtype = DType::kBFloat16;
    shared.fp8_blocks = false;
    shared.experts = 0;
    shared.width = 0;
    return shared;
}

MoeLayout make_layout(const MoeCudaTensors& tensors, int64_t tokens, int64_t k, int64_t sm_count) {
    MoeLayout layout;
    const bool grouped = tensors.grouped();
    layout.tile_max = choose_tile_max(tensors, tokens, k);
    // The rows of the shared expert alone lie in their order already.
    layout.x_sorted = grouped ? tensors.width >= kSortedWidth && tokens * k / tensors.experts >= kSortedMean
                              : tensors.experts == 0 && layout.tile_max == WideShape::kTileMax;
    layout.routed_rows = tokens * k;
    layout.thirds = takes_thirds(tensors, layout.routed_rows, layout.tile_max, sm_count);
    const bool shared = tensors.shared_width > 0 && !grouped;
    layout.rows = layout.routed_rows + (shared ? tokens : 0);
    layout.act_width = shared ? std::max(tensors.width, tensors.shared_width) : tensors.width;
    if (shared) {
        layout.shared_rows = shared_item_rows(tensors, tokens, layout.tile_max, sm_count);
        layout.shared_items = (tokens + layout.shared_rows - 1) / layout.shared_rows;
    }
    if (tensors.experts > 0 && layout.routed_rows > 0) {
        const int64_t mean = (layout.routed_rows + tensors.experts - 1) / tensors.experts;
        const int64_t pieces = (mean + layout.tile_max - 1) / layout.tile_max;
        layout.mean_rows = (mean + pieces - 1) / pieces;
    }
    // Every expert may add one partly filled tile.
    const int64_t items = layout.routed_rows / layout.tile_max + tensors.experts + 1;
    layout.items_max = layout.shared_items + items;
    layout.early_items = static_cast<int32_t>(early_items(tensors, layout, sm_count));
    layout.counters_count = kReady + (grouped ? 2 : 1) * layout.items_max;
    const bool fp8 = tensors.dtype == DType::kFloat8E4M3 || grouped;
    const auto take = [&layout](int64_t bytes) {
        const int64_t at = layout.bytes;
        layout.bytes += round_up(bytes, 256);
        return at;
    };
    layout.counters = take(layout.counters_count * 4);
    layout.items = take(items * static_cast<int64_t>(sizeof(ExpertsItem)));
    layout.down_items = take(items * static_cast<int64_t>(sizeof(ExpertsItem)));
    layout.row_source = take(layout.routed_rows * 4);
    layout.slots = take(layout.routed_rows * 4);
    layout.x = take(fp8 ? tokens * tensors.hidden : 0);
    layout.shared_x = take(fp8 && !grouped ? tokens * tensors.hidden : 0);
    layout.sorted_x = take(grouped && layout.x_sorted ? layout.routed_rows * tensors.hidden : 0);
    layout.act = take(layout.rows * layout.act_width * (fp8 ? 1 : 2));
    layout.x_scale = take(grouped ? tokens * 4 : 0);
    layout.act_bf16 = take(grouped ? layout.rows * layout.act_width * 2 : 0);
    layout.act_scale = take(grouped ? layout.rows * 4 : 0);
    if (grouped && tensors.shared_width > 0) {
        layout.beside = take(make_layout(shared_tensors(tensors), tokens, 0, sm_count).bytes);
        layout.rows += tokens;  // of out
    }
    layout.out = take(layout.rows * tensors.hidden * 2);
    return layout;
}

}  // namespace tessera::cuda

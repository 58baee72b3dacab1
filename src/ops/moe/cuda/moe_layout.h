// How a call of moe_cuda() is cut into tiles, and where its workspace lies.
#pragma once

#include <cstdint>

#include "ops/moe/cuda/experts.cuh"
#include "ops/moe/cuda/moe_cuda.h"

namespace tessera::cuda {

// Tiles for few, some and many tokens an expert. At few the weights' rows are cut finer.
using NarrowShape = ExpertsShape<1, 16, 11, false>;
using MiddleShape = ExpertsShape<2, 64, 5, true>;
using WideShape = ExpertsShape<2, 192, 4, false>;

// Whether a tile of a down product is a few stages.
bool is_short(int64_t width, int64_t value_bytes);

int64_t round_up(int64_t value, int64_t to);

struct MoeLayout {
    int tile_max = 0;
    bool thirds = false;  // tiles are those of ExpertsThirdsShape
    bool x_sorted = false;
    int64_t routed_rows = 0;
    int64_t rows = 0;
    int64_t act_width = 0;
    int64_t shared_items = 0;
    int64_t shared_rows = 0;  // of an item
    int64_t mean_rows = 0;    // of a routed one, where tokens spread evenly
    int64_t items_max = 0;
    int32_t early_items = 0;  // see ExpertsArgs
    int64_t counters_count = 0;
    // Offsets.
    int64_t counters = 0, items = 0, down_items = 0, row_source = 0, slots = 0, x = 0, shared_x = 0,
            sorted_x = 0;
    int64_t act = 0, out = 0;
    int64_t x_scale = 0, act_bf16 = 0, act_scale = 0;  // grouped only
    int64_t beside = 0;                                // grouped only: the layout of the shared expert
    int64_t bytes = 0;
};

// The counters: the next tile, the numbers of routed items, ready[items]; with grouped weights stored[items]
// too.
inline constexpr int64_t kRoutedItems = 2;
inline constexpr int64_t kReady = 4;

MoeLayout make_layout(const MoeCudaTensors& tensors, int64_t tokens, int64_t k, int64_t sm_count);

// Tiles of gate and up of an item, not of grouped weights.
int64_t gate_tiles(const MoeLayout& layout, int64_t width);

// Whether each block of the experts' kernel makes the plan for itself.
bool plans_itself(const MoeCudaTensors& t, int64_t pairs, int tile_max);

// Its counters, which all such calls share.
struct OwnCounters {
    uint32_t left;
    int32_t next_tile;
    // Of the shared expert an item for 16 tokens at least; of the routed ones ExpertsOwnPlan::kItems.
    int32_t ready[kOwnPairs / 16 + 1 + kOwnExperts + kOwnPairs / 16];
};
constexpr int64_t kOwnCountersBytes = (sizeof(OwnCounters) + 255) / 256 * 256;

// What stands beside grouped experts, as a layer of its own.
MoeCudaTensors shared_tensors(const MoeCudaTensors& tensors);

}  // namespace tessera::cuda

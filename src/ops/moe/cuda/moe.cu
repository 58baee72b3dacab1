#include <algorithm>
#include <optional>

#include "base/check.h"
#include "device/cuda/cuda_check.h"
#include "ops/common/cuda/tensor_map.h"
#include "ops/linear/cuda/linear_cuda.h"
#include "ops/moe/cuda/combine.cuh"
#include "ops/moe/cuda/experts_kernel.cuh"
#include "ops/moe/cuda/experts_w4.h"
#include "ops/moe/cuda/few_experts.h"
#include "ops/moe/cuda/moe_cuda.h"
#include "ops/moe/cuda/narrow_few_w4.h"
#include "ops/moe/cuda/narrow_w4.h"
#include "ops/moe/cuda/plan.cuh"

namespace tessera::cuda {
namespace {

// Tiles for few, some and many tokens an expert. At few the weights' rows are cut finer.
using NarrowShape = ExpertsShape<1, 16, 11, false>;
using MiddleShape = ExpertsShape<2, 64, 5, true>;
using WideShape = ExpertsShape<2, 192, 4, false>;

// int4: from here on x is copied into the order of the rows. Rows an expert, and outputs that hide the copy.
constexpr int64_t kSortedMean = 128;
constexpr int64_t kSortedWidth = 512;

// int4: two blocks a multiprocessor up to here, rows an expert: with tiles of as many rows of weights as else
// if experts are narrow, so that tiles of down are short, or gate and up are some rounds of the blocks
// (outputs of all experts); with half as many otherwise.
constexpr int64_t kW4FewMean = 28;
constexpr int64_t kW4PairMean = 12;
constexpr int64_t kW4FewOutputs = 1 << 17;

// int4: wide tiles from here on, rows an expert and (token, expert) pairs.
constexpr int64_t kW4WideMean = 112;
constexpr int64_t kW4WidePairs = 16384;

// int4, narrow experts: rows an expert up to which narrow_w4.cuh makes items of few rows, of some, and serves
// at all.
constexpr int64_t kNarrowShortMean = 21;
constexpr int64_t kNarrowSomeMean = 33;
constexpr int64_t kNarrowManyMean = 48;

// Up to so many bytes the experts' outputs may have the better part of the level-2 cache until they are
// added.
constexpr int64_t kKeepBytes = 20 << 20;

// Whether a tile of a down product is a few stages.
bool is_short(int64_t width, int64_t value_bytes) {
    return width * value_bytes <= 4 * kSwizzleRowBytes;
}

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
    if (tensors.dtype == DType::kInt4) {
        return choose_w4_tile(tensors, mean, tokens * k);
    }
    const int64_t middle = experts > 0 ? 48 : MiddleShape::kTileMax;
    // Its down tiles would be too small.
    const bool narrow = !is_short(std::max(tensors.width, tensors.shared_width), dtype_size(tensors.dtype));
    return mean <= 12 && narrow ? NarrowShape::kTileMax
           : mean <= middle     ? MiddleShape::kTileMax
                                : WideShape::kTileMax;
}

int64_t round_up(int64_t value, int64_t to) {
    return (value + to - 1) / to * to;
}

struct Layout {
    int tile_max = 0;
    bool thirds = false;  // tiles are those of ExpertsThirds
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
    int64_t x_scale = 0, act_bf16 = 0, act_scale = 0;  // int4 only
    int64_t beside = 0;                                // int4 only: the layout of the shared expert
    int64_t bytes = 0;
};

// The counters: the next tile, the numbers of routed items, ready[items]; with int4 stored[items] too.
constexpr int64_t kRoutedItems = 2;
constexpr int64_t kReady = 4;

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

// Tiles of gate and up of an item, not int4.
int64_t gate_tiles(const Layout& layout, int64_t width) {
    static_assert(MiddleShape::kOutputs == WideShape::kOutputs);
    const int64_t outputs = layout.thirds                              ? ExpertsThirds::kOutputs
                            : layout.tile_max == NarrowShape::kTileMax ? NarrowShape::kOutputs
                                                                       : MiddleShape::kOutputs;
    return (width + outputs - 1) / outputs;
}

// Whether each block of the experts' kernel makes the plan for itself.
bool plans_itself(const MoeCudaTensors& t, int64_t pairs, int tile_max) {
    return t.dtype != DType::kInt4 && t.experts > 0 && t.experts <= kOwnExperts && pairs > 0 &&
           pairs <= kOwnPairs && tile_max <= MiddleShape::kTileMax;
}
// Routed experts with many rows, e4m3.
bool takes_thirds(const MoeCudaTensors& t, int64_t pairs, int tile_max) {
    return t.dtype == DType::kFloat8E4M3 && t.experts > 0 && pairs > 0 && tile_max == WideShape::kTileMax;
}
// How many experts' first items are the first routed ones: as many as the blocks' first tiles reach, if
// nearly all experts have tokens, and one item each, since neighbours share their weights. int4: none, its
// blocks wait for the tokens in e4m3 as well. Where each block makes the plan, its code would wait behind
// these weights.
int64_t early_items(const MoeCudaTensors& t, const Layout& layout, int64_t sm_count) {
    if (t.dtype == DType::kInt4 || t.experts == 0 || t.width == 0 ||
        layout.routed_rows < kEarlyMean * t.experts || layout.routed_rows > layout.tile_max * t.experts ||
        plans_itself(t, layout.routed_rows, layout.tile_max)) {
        return 0;
    }
    const int64_t shared_tiles = layout.shared_items * gate_tiles(layout, t.shared_width);
    const int64_t left = std::max<int64_t>(sm_count - shared_tiles, 0);
    return std::min(t.experts, left / gate_tiles(layout, t.width));
}

// Its counters, which all such calls share.
struct OwnCounters {
    uint32_t left;
    int32_t next_tile;
    // Of the shared expert an item for 16 tokens at least; of the routed ones ExpertsOwnPlan::kItems.
    int32_t ready[kOwnPairs / 16 + 1 + kOwnExperts + kOwnPairs / 16];
};
constexpr int64_t kOwnCountersBytes = (sizeof(OwnCounters) + 255) / 256 * 256;

// What stands beside int4 experts, as a layer of its own.
MoeCudaTensors shared_tensors(const MoeCudaTensors& tensors) {
    MoeCudaTensors shared = tensors;
    shared.dtype = tensors.shared_dtype;
    shared.experts = 0;
    shared.width = 0;
    return shared;
}

Layout make_layout(const MoeCudaTensors& tensors, int64_t tokens, int64_t k, int64_t sm_count) {
    Layout layout;
    const bool w4 = tensors.dtype == DType::kInt4;
    layout.tile_max = choose_tile_max(tensors, tokens, k);
    // The rows of the shared expert alone lie in their order already.
    layout.x_sorted = w4 ? tensors.width >= kSortedWidth && tokens * k / tensors.experts >= kSortedMean
                         : tensors.experts == 0 && layout.tile_max == WideShape::kTileMax;
    layout.routed_rows = tokens * k;
    layout.thirds = takes_thirds(tensors, layout.routed_rows, layout.tile_max);
    const bool shared = tensors.shared_width > 0 && !w4;
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
    layout.counters_count = kReady + (w4 ? 2 : 1) * layout.items_max;
    const bool fp8 = tensors.dtype == DType::kFloat8E4M3 || w4;
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
    layout.shared_x = take(fp8 && !w4 ? tokens * tensors.hidden : 0);
    layout.sorted_x = take(w4 && layout.x_sorted ? layout.routed_rows * tensors.hidden : 0);
    layout.act = take(layout.rows * layout.act_width * (fp8 ? 1 : 2));
    layout.x_scale = take(w4 ? tokens * 4 : 0);
    layout.act_bf16 = take(w4 ? layout.rows * layout.act_width * 2 : 0);
    layout.act_scale = take(w4 ? layout.rows * 4 : 0);
    if (w4 && tensors.shared_width > 0) {
        layout.beside = take(make_layout(shared_tensors(tensors), tokens, 0, sm_count).bytes);
        layout.rows += tokens;  // of out
    }
    layout.out = take(layout.rows * tensors.hidden * 2);
    return layout;
}

template <bool Fp8, typename Shape>
void launch_shape(cudaStream_t stream, const ExpertsArgs& args, const Layout& layout, int blocks) {
    // A down tile of few stages would wait for its claim.
    const int tiles = (args.hidden + Shape::kWeightRows - 1) / Shape::kWeightRows;
    const int width = std::max(args.routed.width, args.shared.width);
    ExpertsLook look;
    if (Shape::kTileMax == MiddleShape::kTileMax && is_short(width, Fp8 ? 1 : 2)) {
        look = {.run = tiles % 2 == 0 ? 2 : 1, .ahead = 3};
    }
    look.keep = layout.rows * args.hidden * 2 <= kKeepBytes;
    const auto columns_of = [](int64_t rows) { return static_cast<int32_t>(round_up(rows, 16)); };
    look.first_columns = columns_of(layout.shared_rows);
    look.columns = layout.mean_rows > 0 ? columns_of(layout.mean_rows) : look.first_columns;
    cuda_check(cudaFuncSetAttribute(experts_kernel<Fp8, Shape>, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                    Shape::kBytes));
    cuda_check(launch_dependent({.grid = dim3(static_cast<unsigned>(blocks)),
                                 .threads = Shape::kThreads,
                                 .shared_bytes = Shape::kBytes,
                                 .stream = stream},
                                experts_kernel<Fp8, Shape>, args, look));
}

template <bool Fp8>
void launch_experts(cudaStream_t stream, const ExpertsArgs& args, const Layout& layout, int blocks) {
    if (layout.tile_max == NarrowShape::kTileMax) {
        launch_shape<Fp8, NarrowShape>(stream, args, layout, blocks);
    } else if (layout.tile_max == MiddleShape::kTileMax) {
        launch_shape<Fp8, MiddleShape>(stream, args, layout, blocks);
    } else if (Fp8 && layout.thirds) {
        launch_shape<true, ExpertsThirds>(stream, args, layout, blocks);
    } else {
        launch_shape<Fp8, WideShape>(stream, args, layout, blocks);
    }
}

// Whether the routed and the shared experts read the same fp8 activations.
bool one_input(const MoeCudaTensors& t) {
    return t.experts == 0 || t.shared_width == 0 || t.input_scale == t.shared_input_scale;
}

void quantise_inputs(cudaStream_t stream, const MoeCudaArgs& args, const Layout& layout) {
    const MoeCudaTensors& t = args.weights->tensors;
    const int64_t count = args.tokens * t.hidden;
    if (args.x8 == nullptr) {
        quantize_cuda(stream, {.x = args.x,
                               .count = count,
                               .scale = t.experts > 0 ? t.input_scale : t.shared_input_scale,
                               .y = args.workspace + layout.x});
    }
    if (!one_input(t)) {
        quantize_cuda(stream, {.x = args.x,
                               .count = count,
                               .scale = t.shared_input_scale,
                               .y = args.workspace + layout.shared_x});
    }
}

PlanArgs plan_args(const MoeCudaArgs& args, const Layout& layout) {
    auto* counters = reinterpret_cast<int32_t*>(args.workspace + layout.counters);
    return {.chosen = args.chosen,
            .tokens = static_cast<int32_t>(args.tokens),
            .k = static_cast<int32_t>(args.k),
            .experts = static_cast<int32_t>(args.weights->tensors.experts),
            .tile_max = layout.tile_max,
            .counters = counters,
            .counters_count = static_cast<int32_t>(layout.counters_count),
            .early_items = layout.early_items,
            .routed_items = counters + kRoutedItems,
            .items = reinterpret_cast<ExpertsItem*>(args.workspace + layout.items),
            .down_items = reinterpret_cast<ExpertsItem*>(args.workspace + layout.down_items),
            .row_source = reinterpret_cast<int32_t*>(args.workspace + layout.row_source),
            .slots = reinterpret_cast<int32_t*>(args.workspace + layout.slots)};
}

// Whether rows of down come in boxes of 128 in which a warp's two times 16 are neighbours.
bool down_pairs(const MoeCudaTensors& t) {
    return t.hidden % 128 == 0;
}

struct ExpertInputs {
    const uint8_t* routed = nullptr;
    const uint8_t* shared = nullptr;
};
ExpertInputs expert_inputs(const MoeCudaArgs& args, const Layout& layout) {
    const MoeCudaTensors& t = args.weights->tensors;
    const auto* x = static_cast<const uint8_t*>(args.x);
    if (t.dtype != DType::kFloat8E4M3) {
        return {x, x};
    }
    x = args.x8 != nullptr ? args.x8 : reinterpret_cast<const uint8_t*>(args.workspace + layout.x);
    return {x, one_input(t) ? x : reinterpret_cast<const uint8_t*>(args.workspace + layout.shared_x)};
}

// own: null where no block makes the plan for itself.
ExpertsArgs experts_args(const MoeCudaArgs& args, const Layout& layout, const PlanArgs& plan,
                         OwnCounters* own) {
    const MoeCudaTensors& t = args.weights->tensors;
    const bool narrow = layout.tile_max == NarrowShape::kTileMax;
    const auto gate_up = [&](const MoeCudaMaps& maps) {
        return layout.thirds ? maps.gate_up_thirds : narrow ? maps.gate_up_fine : maps.gate_up;
    };
    const auto down = [&](const MoeCudaMaps& maps) {
        return layout.thirds ? maps.down_thirds : narrow ? maps.down_fine : maps.down;
    };
    const auto [x, shared_x] = expert_inputs(args, layout);
    const MoeCudaMaps& routed = args.weights->routed;
    const MoeCudaMaps& shared = args.weights->shared;
    std::byte* act = args.workspace + layout.act;
    // What lies past an expert's own width reads as zeros.
    const auto act_map = [&](int64_t width) {
        return make_tensor_map(act, {.dtype = t.dtype,
                                     .rank = 2,
                                     .sizes = {width, layout.rows},
                                     .strides = {layout.act_width * dtype_size(t.dtype)},
                                     .box = {kRowBoxRows}});
    };
    ExpertsArgs out{.hidden = static_cast<int32_t>(t.hidden),
                    .tokens = static_cast<int32_t>(args.tokens),
                    .shared_items = static_cast<int32_t>(layout.shared_items),
                    .shared_rows = static_cast<int32_t>(layout.shared_rows),
                    .shared_row = static_cast<int32_t>(layout.routed_rows),
                    .early_items = layout.early_items,
                    .gate_tiles = static_cast<int32_t>(gate_tiles(layout, t.width)),
                    .shared_gate_tiles = static_cast<int32_t>(gate_tiles(layout, t.shared_width)),
                    .x_stride = static_cast<int32_t>(t.hidden * dtype_size(t.dtype)),
                    .x_sorted = layout.x_sorted,
                    .down_pairs = down_pairs(t),
                    .items = plan.items,
                    .down_items = plan.down_items,
                    .routed_items = plan.routed_items,
                    .row_source = plan.row_source,
                    .next_tile = plan.counters,
                    .ready = plan.counters + kReady,
                    .act = reinterpret_cast<uint8_t*>(act),
                    .out = args.workspace + layout.out,
                    .act_stride = layout.act_width};
    out.routed = {.gate_up = gate_up(routed),
                  .down = down(routed),
                  .act = t.width > 0 ? act_map(t.width) : CUtensorMap{},
                  .width = static_cast<int32_t>(t.width),
                  .x = x,
                  .input_scale = t.input_scale,
                  .gate_up_scale = t.gate_up_scale,
                  .down_scale = t.down_scale,
                  .down_input_scale = t.down_input_scale};
    out.shared = {.gate_up = gate_up(shared),
                  .down = down(shared),
                  .act = t.shared_width > 0 ? act_map(t.shared_width) : CUtensorMap{},
                  .width = static_cast<int32_t>(t.shared_width),
                  .x = shared_x,
                  .input_scale = t.shared_input_scale,
                  .gate_up_scale = t.shared_gate_up_scale,
                  .down_scale = t.shared_down_scale,
                  .down_input_scale = t.shared_down_input_scale};
    if (plans_itself(t, layout.routed_rows, layout.tile_max)) {
        out.chosen = args.chosen;
        out.k = static_cast<int32_t>(args.k);
        out.experts = static_cast<int32_t>(t.experts);
        out.slots = plan.slots;
        out.left = &own->left;
        out.next_tile = &own->next_tile;
        out.ready = own->ready;
        out.ready_count = static_cast<int32_t>(std::size(own->ready));
    }
    if (layout.x_sorted) {
        out.shared.x_rows = make_tensor_map(shared_x, t.dtype, args.tokens, t.hidden, kRowBoxRows);
    }
    return out;
}

void launch_plan(cudaStream_t stream, const PlanArgs& plan) {
    const int cluster = plan.tokens * plan.k > kPlanPairs ? kPlanCluster : 1;
    const int quantizing = plan.x != nullptr ? (plan.tokens + kQuantizeRows - 1) / kQuantizeRows : 0;
    const int blocks = cluster + (quantizing + cluster - 1) / cluster * cluster;
    cuda_check(launch_dependent({.grid = dim3(static_cast<unsigned>(blocks)),
                                 .threads = kPlanThreads,
                                 .stream = stream,
                                 .cluster = cluster},
                                plan_kernel, plan));
}

// x: [tokens, hidden] e4m3.
void launch_sort_rows(cudaStream_t stream, const uint8_t* x, const MoeCudaArgs& args, const PlanArgs& plan,
                      const Layout& layout) {
    constexpr int kRows = kSortRowsThreads / 32;
    const SortRowsArgs sort{.x = x,
                            .slots = plan.slots,
                            .pairs = static_cast<int32_t>(layout.routed_rows),
                            .k = static_cast<int32_t>(args.k),
                            .row_bytes = static_cast<int32_t>(args.weights->tensors.hidden),
                            .sorted = reinterpret_cast<uint8_t*>(args.workspace + layout.sorted_x)};
    cuda_check(
        launch_dependent({.grid = dim3(static_cast<unsigned>((layout.routed_rows + kRows - 1) / kRows)),
                          .threads = kSortRowsThreads,
                          .stream = stream},
                         sort_rows_kernel, sort));
}

// shared_row: of token 0 in out; -1 without a shared expert.
void launch_combine(cudaStream_t stream, const MoeCudaArgs& args, const PlanArgs& plan, const Layout& layout,
                    int32_t shared_row) {
    const int64_t hidden = args.weights->tensors.hidden;
    const CombineArgs combine{.out = reinterpret_cast<const __nv_bfloat16*>(args.workspace + layout.out),
                              .slots = plan.slots,
                              .weights = args.expert_weights,
                              .hidden = static_cast<int32_t>(hidden),
                              .k = static_cast<int32_t>(args.k),
                              .shared_row = shared_row,
                              .y = static_cast<__nv_bfloat16*>(args.y)};
    const int64_t blocks = (hidden / 8 + kCombineThreads - 1) / kCombineThreads;
    cuda_check(
        launch_dependent({.grid = dim3(static_cast<unsigned>(blocks), static_cast<unsigned>(args.tokens)),
                          .threads = kCombineThreads,
                          .stream = stream},
                         args.k == 8 ? combine_kernel<8> : combine_kernel<1>, combine));
}

ExpertsW4Args experts_w4_args(const MoeCudaArgs& args, const Layout& layout, const PlanArgs& plan) {
    const MoeCudaTensors& t = args.weights->tensors;
    std::byte* work = args.workspace;
    ExpertsW4Args out{.experts = {.hidden = static_cast<int32_t>(t.hidden),
                                  .tokens = static_cast<int32_t>(args.tokens),
                                  .x_stride = static_cast<int32_t>(t.hidden),
                                  .x_sorted = layout.x_sorted,
                                  .items = plan.items,
                                  .down_items = plan.down_items,
                                  .routed_items = plan.routed_items,
                                  .row_source = plan.row_source,
                                  .x_scale = plan.x_scale,
                                  .next_tile = plan.counters,
                                  .ready = plan.counters + kReady,
                                  .act = reinterpret_cast<uint8_t*>(work + layout.act),
                                  .out = work + layout.out,
                                  .act_stride = layout.act_width},
                      .gate_up = static_cast<const uint8_t*>(t.gate_up),
                      .down = static_cast<const uint8_t*>(t.down),
                      .act_bf16 = reinterpret_cast<uint16_t*>(work + layout.act_bf16),
                      .act_scale = reinterpret_cast<float*>(work + layout.act_scale),
                      .stored = plan.counters + kReady + layout.items_max};
    out.experts.routed = {.act = make_tensor_map(work + layout.act, DType::kFloat8E4M3, layout.routed_rows,
                                                 t.width, kRowBoxRows),
                          .width = static_cast<int32_t>(t.width),
                          .x = reinterpret_cast<const uint8_t*>(work + layout.x)};
    if (layout.x_sorted) {
        out.experts.routed.x_rows = make_tensor_map(work + layout.sorted_x, DType::kFloat8E4M3,
                                                    layout.routed_rows, t.hidden, kRowBoxRows);
    }
    return out;
}

// The shared expert beside int4 ones, with the kernel of its own dtype; its rows follow the routed ones in
// out.
struct SharedW4 {
    MoeCudaWeights weights;
    MoeCudaArgs args;
    Layout layout;
    PlanArgs plan;
    std::byte* exchange;  // of few_experts_cuda()

    SharedW4(const MoeCudaArgs& whole, const Layout& whole_layout, std::byte* few_exchange)
        : weights(*whole.weights), args(whole), exchange(few_exchange) {
        weights.tensors = shared_tensors(weights.tensors);
        args.weights = &weights;
        args.x8 = nullptr;
        args.k = 0;
        args.workspace += whole_layout.beside;
        layout = make_layout(weights.tensors, args.tokens, 0, args.sm_count);
        plan = plan_args(args, layout);
    }
    SharedW4(const SharedW4&) = delete;
    SharedW4& operator=(const SharedW4&) = delete;

    bool fp8() const { return weights.tensors.dtype == DType::kFloat8E4M3; }
    // For a few tokens.
    void launch_few(cudaStream_t stream, std::byte* out) const {
        MoeCudaArgs alone = args;
        alone.y = out;
        const auto [x, shared_x] = expert_inputs(alone, layout);
        few_experts_cuda(stream, alone, {.x = x, .shared_x = shared_x, .exchange = exchange, .add = false});
    }
    void launch(cudaStream_t stream, std::byte* out) const {
        ExpertsArgs experts = experts_args(args, layout, plan, nullptr);
        experts.out = out;
        if (fp8()) {
            launch_experts<true>(stream, experts, layout, args.sm_count);
        } else {
            launch_experts<false>(stream, experts, layout, args.sm_count);
        }
    }
};

// shared: may be null.
void few_w4(cudaStream_t stream, const MoeCudaArgs& args, const Layout& layout, const SharedW4* shared,
            std::byte* exchange) {
    std::byte* shared_out = shared != nullptr ? args.workspace + layout.out : nullptr;
    if (shared != nullptr) {
        shared->launch_few(stream, shared_out);
    }
    few_experts_w4_cuda(stream, args, {.exchange = exchange + few_exchange_bytes(), .more = shared_out});
}

// Rows of an item where narrow_w4.cuh serves the call, else 0: with more rows an expert the products limit.
int narrow_rows(const MoeCudaArgs& args) {
    const MoeCudaTensors& t = args.weights->tensors;
    const int64_t mean = args.tokens * args.k / t.experts;
    const int rows = mean <= kNarrowShortMean  ? kNarrowShortRows
                     : mean <= kNarrowSomeMean ? kNarrowSomeRows
                                               : kNarrowManyRows;
    const NarrowSizes sizes{.tokens = args.tokens, .k = args.k, .experts = t.experts, .width = t.width};
    return mean <= kNarrowManyMean && narrow_w4_serves(sizes, rows, args.sm_count) ? rows : 0;
}

// Whether narrow_few_w4.cuh serves the call.
bool narrow_few(const MoeCudaArgs& args) {
    const MoeCudaTensors& t = args.weights->tensors;
    const NarrowSizes sizes{.tokens = args.tokens, .k = args.k, .experts = t.experts, .width = t.width};
    return !args.batch_invariant && narrow_few_serves(sizes, t.hidden);
}

// Whether narrow_w4.cuh or narrow_few_w4.cuh serves the call: then it is launched. shared: may be null.
bool narrow_w4(cudaStream_t stream, const MoeCudaArgs& args, const Layout& layout, const SharedW4* shared,
               const PlanArgs& plan) {
    const bool few = narrow_few(args);
    const int rows = narrow_rows(args);
    if (rows == 0 && !few) {
        return false;
    }
    const MoeCudaTensors& t = args.weights->tensors;
    std::byte* work = args.workspace;
    const int64_t pairs = args.tokens * args.k;
    launch_narrow_inputs(stream,
                         {.x = plan.x,
                          .x8 = plan.x8,
                          .x_scale = plan.x_scale,
                          .hidden = plan.hidden,
                          .chosen = args.chosen,
                          .k = plan.k,
                          .experts = plan.experts,
                          .slots = plan.slots,
                          .counters = plan.more_counters,
                          .counters_count = plan.more_counters_count},
                         args.tokens);
    std::byte* shared_out = work + layout.out + pairs * t.hidden * 2;
    if (shared != nullptr && few && few_experts_serves(shared->args)) {
        shared->launch_few(stream, shared_out);
    } else if (shared != nullptr) {
        shared->launch(stream, shared_out);
    }
    if (few) {
        launch_narrow_few(
            stream,
            {.chosen = args.chosen,
             .tokens = static_cast<int32_t>(args.tokens),
             .k = plan.k,
             .experts = plan.experts,
             .hidden = plan.hidden,
             .early = shared == nullptr,
             .x = plan.x8,
             .x_scale = plan.x_scale,
             .gate_up = static_cast<const uint8_t*>(t.gate_up),
             .down = static_cast<const uint8_t*>(t.down),
             .act = reinterpret_cast<uint16_t*>(work + layout.act_bf16),
             .expert_weights = args.expert_weights,
             .more = shared != nullptr ? reinterpret_cast<const uint16_t*>(shared_out) : nullptr,
             .y = static_cast<uint16_t*>(args.y)},
            args.sm_count);
        return true;
    }
    launch_narrow_w4(stream,
                     {.chosen = args.chosen,
                      .pairs = static_cast<int32_t>(pairs),
                      .k = plan.k,
                      .experts = plan.experts,
                      .hidden = plan.hidden,
                      .early = shared == nullptr,
                      .x = plan.x8,
                      .x_scale = plan.x_scale,
                      .gate_up = static_cast<const uint8_t*>(t.gate_up),
                      .down = static_cast<const uint8_t*>(t.down),
                      .out = reinterpret_cast<uint8_t*>(work + layout.out)},
                     rows, args.sm_count);
    launch_combine(stream, args, plan, layout, shared != nullptr ? static_cast<int32_t>(pairs) : -1);
    return true;
}

void moe_w4(cudaStream_t stream, const MoeCudaArgs& args, std::byte* exchange) {
    const MoeCudaTensors& t = args.weights->tensors;
    const Layout layout = make_layout(t, args.tokens, args.k, args.sm_count);
    PlanArgs plan = plan_args(args, layout);
    plan.x = static_cast<const uint16_t*>(args.x);
    plan.x8 = reinterpret_cast<uint8_t*>(args.workspace + layout.x);
    plan.x_scale = reinterpret_cast<float*>(args.workspace + layout.x_scale);
    plan.hidden = static_cast<int32_t>(t.hidden);
    std::optional<SharedW4> shared;
    if (t.shared_width > 0) {
        shared.emplace(args, layout, exchange);
        plan.more_counters = shared->plan.counters;
        plan.more_counters_count = shared->plan.counters_count;
        if (shared->fp8()) {
            quantise_inputs(stream, shared->args, shared->layout);
        }
    }
    if (!narrow_few(args) && few_experts_w4_serves(args) &&
        (!shared.has_value() || few_experts_serves(shared->args))) {
        few_w4(stream, args, layout, shared.has_value() ? &*shared : nullptr, exchange);
        return;
    }
    if (narrow_w4(stream, args, layout, shared.has_value() ? &*shared : nullptr, plan)) {
        return;
    }
    launch_plan(stream, plan);
    if (layout.x_sorted) {
        launch_sort_rows(stream, plan.x8, args, plan, layout);
    }
    if (shared.has_value()) {
        shared->launch(stream, args.workspace + layout.out + layout.routed_rows * t.hidden * 2);
    }
    launch_experts_w4(stream, experts_w4_args(args, layout, plan), layout.tile_max, args.sm_count);
    launch_combine(stream, args, plan, layout,
                   shared.has_value() ? static_cast<int32_t>(layout.routed_rows) : -1);
}

// The maps order the rows of a box of gate and up as the sums of SwiGLU need them in a thread, which holds
// rows r and r + 8 of each 16: with few tokens (`fine`) 8 rows of gate, then the same 8 of up; otherwise all
// of one matrix, and with e4m3 first the even ones of 16, then the odd ones. With few tokens memory alone
// counts, and reads of less than 256 bytes keep it busier: whole at 64 tokens 788 us, 811 with them (H200).
// The rows of down: see down_pairs().
MoeCudaMaps make_maps(const MoeCudaTensors& t, DType dtype, bool shared) {
    const void* gate_up = shared ? t.shared_gate_up : t.gate_up;
    const void* down = shared ? t.shared_down : t.down;
    const int64_t experts = shared ? 1 : t.experts;
    const int64_t width = shared ? t.shared_width : t.width;
    const int64_t hidden = t.hidden;
    const int64_t row = hidden * dtype_size(dtype);
    const bool pairs = dtype == DType::kFloat8E4M3;
    MoeCudaMaps maps;
    maps.gate_up = make_tensor_map(
        gate_up, {.dtype = dtype,
                  .rank = 5,
                  .sizes = {hidden, 8, 2, width / 16, 2 * experts},
                  .strides = {pairs ? 2 * row : row, pairs ? row : 8 * row, 16 * row, width * row},
                  .box = {8, 2, 4, 1}});
    const auto fine = [&](uint32_t eights, bool promote) {
        return make_tensor_map(gate_up, {.dtype = dtype,
                                         .rank = 5,
                                         .sizes = {hidden, 8, 2, width / 8, experts},
                                         .strides = {row, width * row, 8 * row, 2 * width * row},
                                         .box = {8, 2, eights, 1},
                                         .promote = promote});
    };
    maps.gate_up_fine = fine(NarrowShape::kOutputs / 8, false);
    maps.gate_up_thirds = fine(ExpertsThirds::kOutputs / 8, true);
    const int64_t line = width * dtype_size(dtype);
    const auto down_map = [&](bool promote) {
        return make_tensor_map(down, {.dtype = dtype,
                                      .rank = 2,
                                      .sizes = {width, experts * hidden},
                                      .strides = {line},
                                      .box = {128},
                                      .promote = promote});
    };
    maps.down = down_pairs(t) ? make_tensor_map(down, {.dtype = dtype,
                                                       .rank = 5,
                                                       .sizes = {width, 16, 4, 2, experts * hidden / 128},
                                                       .strides = {line, 32 * line, 16 * line, 128 * line},
                                                       .box = {16, 4, 2, 1}})
                              : down_map(true);
    maps.down_fine = down_map(false);
    maps.down_thirds = make_tensor_map(down, dtype, experts * hidden, width,
                                       static_cast<uint32_t>(ExpertsThirds::kWeightRows));
    return maps;
}

}  // namespace
}  // namespace tessera::cuda

namespace tessera {

MoeCudaWeights moe_cuda_bind(const MoeCudaTensors& tensors) {
    const MoeCudaTensors& t = tensors;
    check(t.experts >= 0 && t.experts <= cuda::kExpertsMax, "moe: at most 1024 experts");
    check(t.hidden % 16 == 0 && t.width % 16 == 0 && t.shared_width % 16 == 0,
          "moe: hidden and the experts' widths must be multiples of 16");
    const bool w4 = t.dtype == DType::kInt4;
    const DType others = w4 ? t.shared_dtype : t.dtype;
    check(others == DType::kBFloat16 || others == DType::kFloat8E4M3,
          "moe: bfloat16 or e4m3 weights, or int4 of routed experts");
    check(!w4 || (t.experts > 0 && t.hidden % 128 == 0 && t.hidden <= cuda::kW4HiddenMax &&
                  t.width % 64 == 0 && t.width <= cuda::kW4WidthMax),
          "moe: with int4 weights hidden must be a multiple of 128 and at most 8192, the width of 64 and at "
          "most 2048");
    MoeCudaWeights weights{.tensors = t};
    if (t.experts > 0 && !w4) {
        weights.routed = cuda::make_maps(t, others, false);
    }
    if (t.shared_width > 0) {
        weights.shared = cuda::make_maps(t, others, true);
    }
    return weights;
}

int64_t moe_cuda_workspace_bytes(const MoeCudaTensors& tensors, int64_t tokens_max, int64_t k) {
    // A smaller batch may use smaller tiles, and so more items and counters.
    const int64_t items = tokens_max * (k + 1) / 16 + tensors.experts + 2;
    const int64_t more = items * static_cast<int64_t>(2 * sizeof(cuda::ExpertsItem) + 8);
    return 2 * few_exchange_bytes() + cuda::kOwnCountersBytes +
           cuda::make_layout(tensors, tokens_max, k, 1).bytes + 2 * more;
}

void moe_cuda(cudaStream_t stream, const MoeCudaArgs& whole_args) {
    check(whole_args.tokens >= 1 && whole_args.sm_count >= 1,
          "moe: needs tokens and the device's number of multiprocessors");
    MoeCudaArgs args = whole_args;
    std::byte* exchange = args.workspace;  // of few_experts_cuda(), then of few_experts_w4_cuda()
    std::byte* own = exchange + 2 * few_exchange_bytes();
    args.workspace = own + cuda::kOwnCountersBytes;
    const MoeCudaTensors& t = args.weights->tensors;
    if (t.dtype == DType::kInt4) {
        cuda::moe_w4(stream, args, exchange);
        return;
    }
    const cuda::Layout layout = cuda::make_layout(t, args.tokens, args.k, args.sm_count);
    const bool fp8 = t.dtype == DType::kFloat8E4M3;
    if (fp8) {
        cuda::quantise_inputs(stream, args, layout);
    }
    if (few_experts_serves(args)) {
        const auto [x, shared_x] = cuda::expert_inputs(args, layout);
        few_experts_cuda(stream, args, {.x = x, .shared_x = shared_x, .exchange = exchange});
        return;
    }
    const cuda::PlanArgs plan = cuda::plan_args(args, layout);
    const cuda::ExpertsArgs experts =
        cuda::experts_args(args, layout, plan, reinterpret_cast<cuda::OwnCounters*>(own));
    if (experts.chosen == nullptr) {
        cuda::launch_plan(stream, plan);
    }
    if (fp8) {
        cuda::launch_experts<true>(stream, experts, layout, args.sm_count);
    } else {
        cuda::launch_experts<false>(stream, experts, layout, args.sm_count);
    }
    cuda::launch_combine(stream, args, plan, layout, t.shared_width > 0 ? experts.shared_row : -1);
}

}  // namespace tessera

#include <algorithm>

#include "device/cuda/cuda_check.h"
#include "ops/common/cuda/tensor_map.h"
#include "ops/linear/cuda/linear_cuda.h"
#include "ops/moe/cuda/experts_kernel.cuh"
#include "ops/moe/cuda/experts_launch.h"

namespace tessera::cuda {
namespace {

// Up to so many bytes the experts' outputs may have the better part of the level-2 cache until they are
// added.
constexpr int64_t kKeepBytes = 20 << 20;

// From so many bytes on it pays that they are not written to memory afterwards (H200, width 192: 256 tokens
// 116.3 us, 118.1 without; 128 tokens 0.5 more).
constexpr int64_t kDropBytes = 12 << 20;

// Whether the routed and the shared experts read the same fp8 activations.
bool one_input(const MoeCudaTensors& t) {
    return t.experts == 0 || t.shared_width == 0 || t.input_scale == t.shared_input_scale;
}

template <bool Fp8, typename Shape>
void launch_shape(cudaStream_t stream, const ExpertsArgs& args, const MoeLayout& layout, int blocks) {
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
void launch_tiles(cudaStream_t stream, const ExpertsArgs& args, const MoeLayout& layout, int blocks) {
    if (layout.tile_max == NarrowShape::kTileMax) {
        launch_shape<Fp8, NarrowShape>(stream, args, layout, blocks);
    } else if (Fp8 && layout.thirds && layout.tile_max == ExpertsShortThirds::kTileMax) {
        launch_shape<true, ExpertsShortThirds>(stream, args, layout, blocks);
    } else if (layout.tile_max == MiddleShape::kTileMax) {
        launch_shape<Fp8, MiddleShape>(stream, args, layout, blocks);
    } else if (Fp8 && layout.thirds) {
        launch_shape<true, ExpertsThirds>(stream, args, layout, blocks);
    } else {
        launch_shape<Fp8, WideShape>(stream, args, layout, blocks);
    }
}

}  // namespace

ExpertInputs expert_inputs(const MoeCudaArgs& args, const MoeLayout& layout) {
    const MoeCudaTensors& t = args.weights->tensors;
    const auto* x = static_cast<const uint8_t*>(args.x);
    if (t.dtype != DType::kFloat8E4M3) {
        return {x, x};
    }
    x = args.x8 != nullptr ? args.x8 : reinterpret_cast<const uint8_t*>(args.workspace + layout.x);
    return {x, one_input(t) ? x : reinterpret_cast<const uint8_t*>(args.workspace + layout.shared_x)};
}

void quantise_inputs(cudaStream_t stream, const MoeCudaArgs& args, const MoeLayout& layout) {
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

PlanArgs plan_args(const MoeCudaArgs& args, const MoeLayout& layout) {
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

bool down_pairs(const MoeCudaTensors& t) {
    return t.hidden % 128 == 0;
}

ExpertsArgs experts_args(const MoeCudaArgs& args, const MoeLayout& layout, const PlanArgs& plan,
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

void launch_experts(cudaStream_t stream, const ExpertsArgs& args, const MoeLayout& layout, bool fp8,
                    int blocks) {
    if (fp8) {
        launch_tiles<true>(stream, args, layout, blocks);
    } else {
        launch_tiles<false>(stream, args, layout, blocks);
    }
}

CombineArgs combine_args(const MoeCudaArgs& args, const MoeLayout& layout, const PlanArgs& plan,
                         int32_t shared_row) {
    return {.out = reinterpret_cast<const __nv_bfloat16*>(args.workspace + layout.out),
            .slots = plan.slots,
            .weights = args.expert_weights,
            .hidden = static_cast<int32_t>(args.weights->tensors.hidden),
            .k = static_cast<int32_t>(args.k),
            .shared_row = shared_row,
            .y = static_cast<__nv_bfloat16*>(args.y)};
}

CombineArgs combine_own_args(const MoeCudaArgs& args, const MoeLayout& layout, int32_t shared_row) {
    const MoeCudaTensors& t = args.weights->tensors;
    CombineArgs out = combine_args(args, layout, {}, shared_row);
    out.slots = args.chosen;
    out.own_below = static_cast<int32_t>(t.experts);
    out.drop_rows = t.hidden % 64 == 0 && layout.rows * t.hidden * 2 >= kDropBytes;
    return out;
}

NarrowSizes narrow_sizes(const MoeCudaArgs& args) {
    const MoeCudaTensors& t = args.weights->tensors;
    return {.tokens = args.tokens, .k = args.k, .experts = t.experts, .width = t.width, .hidden = t.hidden};
}

NarrowChoices narrow_choices(const MoeCudaArgs& args, int64_t shared_tokens) {
    return {.chosen = args.chosen,
            .pairs = static_cast<int32_t>(args.tokens * args.k),
            .experts = static_cast<int32_t>(args.weights->tensors.experts),
            .shared_tokens = static_cast<int32_t>(shared_tokens)};
}

}  // namespace tessera::cuda

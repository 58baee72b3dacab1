#include <optional>

#include "ops/common/cuda/tensor_map.h"
#include "ops/moe/cuda/experts_grouped.h"
#include "ops/moe/cuda/experts_launch.h"
#include "ops/moe/cuda/few_experts.h"
#include "ops/moe/cuda/moe_grouped.h"
#include "ops/moe/cuda/narrow_few_w4.h"
#include "ops/moe/cuda/narrow_w4.h"

namespace tessera::cuda {
namespace {

// Narrow experts: rows an expert up to which narrow_w4.cuh makes items of few rows, of some, and serves
// at all.
constexpr int64_t kNarrowShortMean = 21;
constexpr int64_t kNarrowSomeMean = 33;
constexpr int64_t kNarrowManyMean = 48;

ExpertsGroupedArgs grouped_args(const MoeCudaArgs& args, const MoeLayout& layout, const PlanArgs& plan) {
    const MoeCudaTensors& t = args.weights->tensors;
    std::byte* work = args.workspace;
    ExpertsGroupedArgs out{.experts = {.hidden = static_cast<int32_t>(t.hidden),
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

// The shared expert beside grouped ones, in bfloat16; its rows follow the routed ones in out.
struct SharedBeside {
    MoeCudaWeights weights;
    MoeCudaArgs args;
    MoeLayout layout;
    PlanArgs plan;
    std::byte* exchange;  // of few_experts_cuda()

    SharedBeside(const MoeCudaArgs& whole, const MoeLayout& whole_layout, std::byte* few_exchange)
        : weights(*whole.weights), args(whole), exchange(few_exchange) {
        weights.tensors = shared_tensors(weights.tensors);
        args.weights = &weights;
        args.x8 = nullptr;
        args.k = 0;
        args.workspace += whole_layout.beside;
        layout = make_layout(weights.tensors, args.tokens, 0, args.sm_count);
        plan = plan_args(args, layout);
    }
    SharedBeside(const SharedBeside&) = delete;
    SharedBeside& operator=(const SharedBeside&) = delete;

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
        launch_experts(stream, experts, layout, false, args.sm_count);
    }
};

struct GroupedCall {
    const MoeCudaArgs& args;
    const MoeLayout& layout;
    const PlanArgs& plan;
    const SharedBeside* shared = nullptr;  // may be null

    // Where the shared expert's rows of out begin; null without one.
    std::byte* shared_out() const {
        const int64_t row = args.weights->tensors.hidden * 2;
        return shared != nullptr ? args.workspace + layout.out + layout.routed_rows * row : nullptr;
    }
};

// exchange: of few_experts_w4_cuda() and few_one_w4_cuda().
void few_w4(cudaStream_t stream, const GroupedCall& call, std::byte* exchange) {
    if (call.shared != nullptr) {
        call.shared->launch_few(stream, call.shared_out());
    }
    const auto launch = few_one_w4_serves(call.args) ? few_one_w4_cuda : few_experts_w4_cuda;
    launch(stream, call.args, {.exchange = exchange, .more = call.shared_out()});
}

// Rows of an item where narrow_w4.cuh serves the call, else 0: with more rows an expert the products limit.
int narrow_rows(const MoeCudaArgs& args) {
    const int64_t mean = args.tokens * args.k / args.weights->tensors.experts;
    const int rows = mean <= kNarrowShortMean  ? kNarrowShortRows
                     : mean <= kNarrowSomeMean ? kNarrowSomeRows
                                               : kNarrowManyRows;
    return mean <= kNarrowManyMean && narrow_w4_serves(narrow_sizes(args), rows, args.sm_count) ? rows : 0;
}

void launch_inputs_of(cudaStream_t stream, const GroupedCall& call) {
    const auto& [args, layout, plan, shared] = call;
    launch_narrow_inputs(stream,
                         {.x = plan.x,
                          .x8 = plan.x8,
                          .x_scale = plan.x_scale,
                          .hidden = plan.hidden,
                          .counters = plan.more_counters,
                          .counters_count = plan.more_counters_count},
                         args.tokens);
}

// By narrow_few_w4.cuh.
void narrow_few(cudaStream_t stream, const GroupedCall& call) {
    const auto& [args, layout, plan, shared] = call;
    const MoeCudaTensors& t = args.weights->tensors;
    launch_inputs_of(stream, call);
    if (shared != nullptr && few_experts_serves(shared->args)) {
        shared->launch_few(stream, call.shared_out());
    } else if (shared != nullptr) {
        shared->launch(stream, call.shared_out());
    }
    launch_narrow_few(stream,
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
                       .act = reinterpret_cast<uint16_t*>(args.workspace + layout.act_bf16),
                       .expert_weights = args.expert_weights,
                       .more = reinterpret_cast<const uint16_t*>(call.shared_out()),
                       .y = static_cast<uint16_t*>(args.y)},
                      args.sm_count);
}

// By narrow_w4.cuh, `rows` an item; a row of out is the pair's own.
void narrow_w4(cudaStream_t stream, const GroupedCall& call, int rows) {
    const auto& [args, layout, plan, shared] = call;
    const MoeCudaTensors& t = args.weights->tensors;
    launch_inputs_of(stream, call);
    if (shared != nullptr) {
        shared->launch(stream, call.shared_out());
    }
    launch_narrow_w4(stream,
                     {.choices = narrow_choices(args, 0),
                      .k = plan.k,
                      .hidden = plan.hidden,
                      .early = shared == nullptr,
                      .x = plan.x8,
                      .x_scale = plan.x_scale,
                      .gate_up = static_cast<const uint8_t*>(t.gate_up),
                      .down = static_cast<const uint8_t*>(t.down),
                      .out = reinterpret_cast<uint8_t*>(args.workspace + layout.out)},
                     rows, args.sm_count);
}

// By a plan and tiles.
void tiles(cudaStream_t stream, const GroupedCall& call) {
    const auto& [args, layout, plan, shared] = call;
    launch_plan(stream, plan);
    if (layout.x_sorted) {
        launch_sort_rows(stream, {.x = plan.x8,
                                  .slots = plan.slots,
                                  .pairs = static_cast<int32_t>(layout.routed_rows),
                                  .k = plan.k,
                                  .row_bytes = plan.hidden,
                                  .sorted = reinterpret_cast<uint8_t*>(args.workspace + layout.sorted_x)});
    }
    if (shared != nullptr) {
        shared->launch(stream, call.shared_out());
    }
    const bool int4 = args.weights->tensors.dtype == DType::kInt4;
    const auto launch = int4 ? launch_experts_w4 : launch_experts_w8;
    launch(stream, grouped_args(args, layout, plan), layout.tile_max, args.sm_count);
}

}  // namespace

void moe_grouped(cudaStream_t stream, const MoeCudaArgs& args, std::byte* exchange) {
    const MoeCudaTensors& t = args.weights->tensors;
    const MoeLayout layout = make_layout(t, args.tokens, args.k, args.sm_count);
    PlanArgs plan = plan_args(args, layout);
    plan.x = static_cast<const uint16_t*>(args.x);
    plan.x8 = reinterpret_cast<uint8_t*>(args.workspace + layout.x);
    plan.x_scale = reinterpret_cast<float*>(args.workspace + layout.x_scale);
    plan.hidden = static_cast<int32_t>(t.hidden);
    std::optional<SharedBeside> beside;
    if (t.shared_width > 0) {
        beside.emplace(args, layout, exchange);
        plan.more_counters = beside->plan.counters;
        plan.more_counters_count = beside->plan.counters_count;
    }
    const GroupedCall call{args, layout, plan, beside.has_value() ? &*beside : nullptr};
    const bool int4 = t.dtype == DType::kInt4;
    const bool shared_few = !beside.has_value() || few_experts_serves(beside->args);
    if (int4 && shared_few && few_one_w4_serves(args)) {
        few_w4(stream, call, exchange + few_exchange_bytes());
        return;
    }
    if (int4 && !args.batch_invariant && narrow_few_serves(narrow_sizes(args))) {
        narrow_few(stream, call);
        return;
    }
    if (int4 && shared_few && few_experts_w4_serves(args)) {
        few_w4(stream, call, exchange + few_exchange_bytes());
        return;
    }
    const int32_t shared_row = beside.has_value() ? static_cast<int32_t>(layout.routed_rows) : -1;
    if (const int rows = int4 ? narrow_rows(args) : 0; rows > 0) {
        narrow_w4(stream, call, rows);
        launch_combine(stream, combine_own_args(args, layout, shared_row), args.tokens);
        return;
    }
    tiles(stream, call);
    launch_combine(stream, combine_args(args, layout, plan, shared_row), args.tokens);
}

}  // namespace tessera::cuda

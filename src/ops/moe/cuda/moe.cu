#include <algorithm>

#include "base/check.h"
#include "ops/moe/cuda/experts_launch.h"
#include "ops/moe/cuda/few_experts.h"
#include "ops/moe/cuda/moe_cuda.h"
#include "ops/moe/cuda/moe_grouped.h"
#include "ops/moe/cuda/narrow_fp8.h"

namespace tessera {
namespace cuda {
namespace {

// Where narrow_fp8.cuh is faster than tiles: up to so many rows an expert on the average, the shared one's
// among them; than few_experts.cuh: from so many pairs on. 132 multiprocessors (H200): 5 tokens 27.8 us
// beside 29.7, 1,024 tokens without a shared expert 156 beside 160, with one 168 beside 167.
constexpr int64_t kNarrowFp8Mean = 44;
constexpr int64_t kNarrowFp8Pairs = 40;

int64_t narrow_fp8_shared_tokens(const MoeCudaArgs& args) {
    return args.weights->tensors.shared_width > 0 ? args.tokens : 0;
}
bool takes_narrow_fp8(const MoeCudaArgs& args) {
    const MoeCudaTensors& t = args.weights->tensors;
    const int64_t pairs = args.tokens * args.k;
    // Half of the clusters ask for all that memory gives.
    return t.dtype == DType::kFloat8E4M3 && (t.shared_width == 0 || t.shared_width == kNarrowWidth) &&
           std::min(t.experts, pairs) >= args.sm_count / 4 &&
           pairs + narrow_fp8_shared_tokens(args) <= kNarrowFp8Mean * t.experts &&
           narrow_fp8_serves(narrow_sizes(args), narrow_fp8_shared_tokens(args), args.sm_count);
}

void launch_narrow(cudaStream_t stream, const MoeCudaArgs& args, const MoeLayout& layout) {
    const MoeCudaTensors& t = args.weights->tensors;
    const auto [x, shared_x] = expert_inputs(args, layout);
    const auto side = [](const MoeCudaMaps& maps) {
        return NarrowFp8Side{.gate_up = maps.gate_up_thirds, .down = maps.down};
    };
    NarrowFp8Args out{.choices = narrow_choices(args, narrow_fp8_shared_tokens(args)),
                      .k = static_cast<int32_t>(args.k),
                      .hidden = static_cast<int32_t>(t.hidden),
                      .out = reinterpret_cast<uint8_t*>(args.workspace + layout.out),
                      .routed = side(args.weights->routed),
                      .shared = side(args.weights->shared)};
    out.routed.x = x;
    out.routed.input_scale = t.input_scale;
    out.routed.gate_up_scale = t.gate_up_scale;
    out.routed.down_scale = t.down_scale;
    out.routed.down_input_scale = t.down_input_scale;
    out.shared.x = shared_x;
    out.shared.input_scale = t.shared_input_scale;
    out.shared.gate_up_scale = t.shared_gate_up_scale;
    out.shared.down_scale = t.shared_down_scale;
    out.shared.down_input_scale = t.shared_down_input_scale;
    launch_narrow_fp8(stream, out, args.sm_count);
    const int32_t shared_row = t.shared_width > 0 ? static_cast<int32_t>(layout.routed_rows) : -1;
    launch_combine(stream, combine_own_args(args, layout, shared_row), args.tokens);
}

}  // namespace
}  // namespace cuda

int64_t moe_cuda_workspace_bytes(const MoeCudaTensors& tensors, int64_t tokens_max, int64_t k) {
    // A smaller batch may use smaller tiles, and so more items and counters.
    const int64_t items = tokens_max * (k + 1) / 16 + tensors.experts + 2;
    const int64_t more = items * static_cast<int64_t>(2 * sizeof(cuda::ExpertsItem) + 8);
    return 2 * few_exchange_bytes() + cuda::kOwnCountersBytes +
           cuda::make_layout(tensors, tokens_max, k, 1).bytes + 2 * more;
}

void moe_cuda(cudaStream_t stream, const MoeCudaArgs& whole_args) {
    check(whole_args.tokens <= kMoeCudaTokensMax && whole_args.sm_count >= 1,
          "moe: needs at most 65535 tokens, and the device's number of multiprocessors");
    if (whole_args.tokens == 0) {
        return;
    }
    MoeCudaArgs args = whole_args;
    std::byte* exchange = args.workspace;  // of few_experts_cuda(), then of few_experts_w4_cuda()
    std::byte* own = exchange + 2 * few_exchange_bytes();
    args.workspace = own + cuda::kOwnCountersBytes;
    const MoeCudaTensors& t = args.weights->tensors;
    if (t.grouped()) {
        cuda::moe_grouped(stream, args, exchange);
        return;
    }
    const cuda::MoeLayout layout = cuda::make_layout(t, args.tokens, args.k, args.sm_count);
    const bool fp8 = t.dtype == DType::kFloat8E4M3;
    if (fp8) {
        cuda::quantise_inputs(stream, args, layout);
    }
    const bool narrow_fp8 = cuda::takes_narrow_fp8(args);
    if (few_experts_serves(args) && !(narrow_fp8 && args.tokens * args.k >= cuda::kNarrowFp8Pairs)) {
        const auto [x, shared_x] = cuda::expert_inputs(args, layout);
        few_experts_cuda(stream, args, {.x = x, .shared_x = shared_x, .exchange = exchange});
        return;
    }
    if (narrow_fp8) {
        cuda::launch_narrow(stream, args, layout);
        return;
    }
    const cuda::PlanArgs plan = cuda::plan_args(args, layout);
    const cuda::ExpertsArgs experts =
        cuda::experts_args(args, layout, plan, reinterpret_cast<cuda::OwnCounters*>(own));
    if (experts.chosen == nullptr) {
        cuda::launch_plan(stream, plan);
    }
    cuda::launch_experts(stream, experts, layout, fp8, args.sm_count);
    const int32_t shared_row = t.shared_width > 0 ? experts.shared_row : -1;
    cuda::launch_combine(stream, cuda::combine_args(args, layout, plan, shared_row), args.tokens);
}

}  // namespace tessera

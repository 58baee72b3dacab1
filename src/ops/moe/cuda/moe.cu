#include "base/check.h"
#include "ops/moe/cuda/experts_launch.h"
#include "ops/moe/cuda/few_experts.h"
#include "ops/moe/cuda/moe_cuda.h"
#include "ops/moe/cuda/moe_grouped.h"

namespace tessera {

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
    cuda::launch_experts(stream, experts, layout, fp8, args.sm_count);
    const int32_t shared_row = t.shared_width > 0 ? experts.shared_row : -1;
    cuda::launch_combine(stream, cuda::combine_args(args, layout, plan, shared_row), args.tokens);
}

}  // namespace tessera

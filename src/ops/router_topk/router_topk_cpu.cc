#include "ops/common/simd_targets.h"
#include "ops/router_topk/router_topk.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/router_topk/router_topk_cpu.cc"
#include <hwy/foreach_target.h>
//
#include <algorithm>
#include <hwy/highway.h>

#include "base/check.h"
#include "ops/common/exp-inl.h"
#include "ops/common/exp.h"

HWY_BEFORE_NAMESPACE();
namespace tessera {
namespace HWY_NAMESPACE {
namespace {  // each file has its own

void sigmoid_row(const float* logits, int64_t n, float* scores) {
    int64_t i = 0;
#if HWY_TARGET != HWY_SCALAR
    const hn::CappedTag<float, 16> d;
    const auto lanes = static_cast<int64_t>(hn::Lanes(d));
    for (; i + lanes <= n; i += lanes) {
        hn::StoreU(sigmoid_simd(d, hn::LoadU(d, logits + i)), d, scores + i);
    }
#endif
    for (; i < n; ++i) {
        scores[i] = sigmoid_f32(logits[i]);
    }
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace tessera
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace tessera {

HWY_EXPORT(sigmoid_row);

namespace {

// The k largest keys, one by one; a strict comparison keeps the lower index on a tie. Among NaNs the choice
// has no meaning, but stays in range.
void choose(const float* keys, int64_t experts, int64_t k, bool* taken) {
    std::fill_n(taken, experts, false);
    for (int64_t i = 0; i < k; ++i) {
        int64_t best = -1;
        for (int64_t e = 0; e < experts; ++e) {
            if (!taken[e] && (best < 0 || keys[e] > keys[best])) {
                best = e;
            }
        }
        taken[best] = true;
    }
}

void route_token(const RouterTopkArgs& args, int64_t t) {
    float scores[kRouterExpertsMax];
    float keys[kRouterExpertsMax];
    bool taken[kRouterExpertsMax];
    HWY_DYNAMIC_DISPATCH(sigmoid_row)(args.logits + t * args.logits_stride, args.experts, scores);
    for (int64_t e = 0; e < args.experts; ++e) {
        keys[e] = args.bias == nullptr ? scores[e] : scores[e] + args.bias[e];
    }
    choose(keys, args.experts, args.k, taken);
    int32_t* chosen = args.chosen + t * args.k;
    float* weights = args.weights + t * args.k;
    float sum = 0.0f;
    int64_t n = 0;
    for (int64_t e = 0; e < args.experts; ++e) {
        if (taken[e]) {
            chosen[n++] = static_cast<int32_t>(e);
            sum += scores[e];
        }
    }
    for (int64_t i = 0; i < args.k; ++i) {
        const float s = scores[chosen[i]];
        weights[i] = (args.normalise ? s / (sum + 1e-20f) : s) * args.scale;
    }
}

}  // namespace

void router_topk(const OpContext& context, const RouterTopkArgs& args) {
    check(args.experts <= kRouterExpertsMax && args.k >= 1 && args.k <= args.experts,
          "router_topk: experts or k out of range");
    constexpr int64_t kTokens = 4;
    context.threads.parallel_for((args.tokens + kTokens - 1) / kTokens, [&](int64_t item, int) {
        const int64_t end = std::min(args.tokens, (item + 1) * kTokens);
        for (int64_t t = item * kTokens; t < end; ++t) {
            route_token(args, t);
        }
    });
}

}  // namespace tessera
#endif

#include <algorithm>
#include <numeric>
#include <vector>

#include "ops/common/exp.h"
#include "ops/router_topk/router_topk.h"

namespace tessera {

void router_topk_ref(const RouterTopkArgs& args) {
    for (int64_t t = 0; t < args.tokens; ++t) {
        std::vector<float> scores;
        std::vector<float> keys;
        for (int64_t e = 0; e < args.experts; ++e) {
            scores.push_back(sigmoid_f32(args.logits[t * args.logits_stride + e]));
            keys.push_back(args.bias == nullptr ? scores.back() : scores.back() + args.bias[e]);
        }
        std::vector<int32_t> order(static_cast<size_t>(args.experts));
        std::iota(order.begin(), order.end(), 0);
        std::stable_sort(order.begin(), order.end(), [&](int32_t a, int32_t b) {
            return keys[static_cast<size_t>(a)] > keys[static_cast<size_t>(b)];
        });
        order.resize(static_cast<size_t>(args.k));
        std::sort(order.begin(), order.end());
        float sum = 0.0f;
        for (int32_t e : order) {
            sum += scores[static_cast<size_t>(e)];
        }
        for (int64_t i = 0; i < args.k; ++i) {
            const int32_t e = order[static_cast<size_t>(i)];
            const float s = scores[static_cast<size_t>(e)];
            args.chosen[t * args.k + i] = e;
            args.weights[t * args.k + i] = (args.normalise ? s / (sum + 1e-20f) : s) * args.scale;
        }
    }
}

}  // namespace tessera

#include <vector>

#include "ops/common/gemm.h"
#include "ops/moe/moe.h"

namespace tessera {
namespace {

// out [hidden] = down(silu(gate x) * up x)
void expert_ref(const ExpertWeights& expert, const float* x, int64_t hidden, float* out) {
    std::vector<float> tile(static_cast<size_t>(kBlockOutputs));
    std::vector<float> h(static_cast<size_t>(expert.gate_up.outputs / 2));
    for (int64_t block = 0; block < expert.gate_up.blocks(); ++block) {
        gemm_block_ref({&x, 1, &expert.gate_up, block, tile.data()});
        swiglu_block_ref({tile.data(), 1, expert.gate_up.block_panels(block) / 2,
                          h.data() + block * kBlockOutputs / 2, 0});
    }
    const float* row = h.data();
    for (int64_t block = 0; block < expert.down.blocks(); ++block) {
        gemm_block_ref({&row, 1, &expert.down, block, tile.data()});
        for (int64_t c = 0; c < kBlockOutputs && block * kBlockOutputs + c < hidden; ++c) {
            out[block * kBlockOutputs + c] = tile[static_cast<size_t>(c)];
        }
    }
}

}  // namespace

void moe_ref(const MoeArgs& args) {
    std::vector<float> out(static_cast<size_t>(args.hidden));
    std::vector<float> sum(static_cast<size_t>(args.hidden));
    for (int64_t t = 0; t < args.tokens; ++t) {
        const float* x = args.x + t * args.x_stride;
        sum.assign(sum.size(), 0.0f);
        for (int64_t i = 0; i < args.k; ++i) {
            const float weight = args.weights[t * args.k + i];
            expert_ref(args.experts[static_cast<size_t>(args.chosen[t * args.k + i])], x, args.hidden,
                       out.data());
            for (size_t c = 0; c < sum.size(); ++c) {
                sum[c] += weight * out[c];
            }
        }
        if (args.shared != nullptr) {
            expert_ref(*args.shared, x, args.hidden, out.data());
            for (size_t c = 0; c < sum.size(); ++c) {
                sum[c] += out[c];
            }
        }
        for (size_t c = 0; c < sum.size(); ++c) {
            args.y[t * args.y_stride + static_cast<int64_t>(c)] += sum[c];
        }
    }
}

}  // namespace tessera

#include "engine_cost.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

namespace tessera {
namespace {

// Elements of the weight matrices of one layer that every token passes through, and of one routed expert.
struct LayerSizes {
    double shared = 0;
    double expert = 0;
};

LayerSizes layer_sizes(const ModelConfig& c, bool moe) {
    LayerSizes sizes;
    const double hidden = static_cast<double>(c.hidden_size);
    sizes.shared = hidden * static_cast<double>(2 * c.q_width() + 2 * c.kv_width());
    if (!moe) {
        sizes.shared += 3 * hidden * static_cast<double>(c.intermediate_size);
        return sizes;
    }
    sizes.shared += hidden * static_cast<double>(c.num_experts + 3 * c.shared_width());
    sizes.expert = 3 * hidden * static_cast<double>(c.moe_intermediate_size);
    return sizes;
}

}  // namespace

PassCost pass_cost(const ModelConfig& c, const PassShape& shape, const ModelBytes& element) {
    PassCost cost;
    const double tokens = static_cast<double>(shape.tokens);
    double weights = 0;
    for (int64_t layer = 0; layer < c.num_layers; ++layer) {
        const LayerSizes sizes = layer_sizes(c, c.is_moe(layer));
        weights += sizes.shared;
        cost.fmas += tokens * (sizes.shared + static_cast<double>(c.num_experts_per_token) * sizes.expert);
        // q k^T and p v, for every query head.
        cost.fmas += 2 * static_cast<double>(shape.attended * c.q_width());
        cost.bytes += static_cast<double>(shape.cached_slots * 2 * c.kv_width() * element.kv);
    }
    const double expert = layer_sizes(c, true).expert;
    const double head = static_cast<double>(c.vocab_size * c.hidden_size);
    weights += static_cast<double>(shape.experts_touched) * expert;
    weights += tokens * static_cast<double>(c.hidden_size);  // rows of the embedding
    if (shape.logit_rows > 0) {
        weights += head;
        cost.fmas += static_cast<double>(shape.logit_rows) * head;
    }
    cost.bytes += weights * static_cast<double>(element.weight);
    return cost;
}

int64_t count_touched_experts(std::span<const float> logits, std::span<const float> bias,
                              const ModelConfig& config) {
    const size_t experts = static_cast<size_t>(config.num_experts);
    std::vector<char> touched(experts);
    std::vector<float> scores(experts);
    std::vector<size_t> order(experts);
    for (size_t row = 0; row + experts <= logits.size(); row += experts) {
        for (size_t e = 0; e < experts; ++e) {
            scores[e] = 1 / (1 + std::exp(-logits[row + e])) + (bias.empty() ? 0.0f : bias[e]);
        }
        std::iota(order.begin(), order.end(), size_t{0});
        std::partial_sort(order.begin(), order.begin() + config.num_experts_per_token, order.end(),
                          [&](size_t a, size_t b) { return scores[a] > scores[b]; });
        for (int64_t i = 0; i < config.num_experts_per_token; ++i) {
            touched[order[static_cast<size_t>(i)]] = 1;
        }
    }
    return std::count(touched.begin(), touched.end(), 1);
}

}  // namespace tessera

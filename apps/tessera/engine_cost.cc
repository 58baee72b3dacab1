#include "engine_cost.h"

#include <algorithm>
#include <cmath>
#include <numeric>
#include <vector>

namespace tessera {
namespace {

// Adds up one pass. Every method takes sizes of one layer, or of the whole pass.
class Costs {
  public:
    Costs(const ModelConfig& config, const PassShape& shape, const ModelBytes& element)
        : config_(config), shape_(shape), element_(element) {}

    OperatorCosts sum() {
        for (int64_t layer = 0; layer < config_.num_layers; ++layer) {
            add_attention();
            config_.is_moe(layer) ? add_experts() : add_dense();
        }
        const double expert_bytes =
            element_.expert > 0 ? element_.expert : static_cast<double>(element_.weight);
        at(PassOperator::kExperts).bytes +=
            static_cast<double>(shape_.experts_touched * expert_size()) * expert_bytes;
        add_ends();
        return costs_;
    }

  private:
    OperatorCost& at(PassOperator op) { return costs_[static_cast<size_t>(op)]; }
    int64_t expert_size() const { return 3 * config_.hidden_size * config_.moe_intermediate_size; }

    // A product of every token with `elements` weights; inputs and outputs a token.
    void add_product(PassOperator op, int64_t elements, int64_t bytes_each, int64_t values) {
        at(op).fmas += static_cast<double>(shape_.tokens * elements);
        at(op).bytes += static_cast<double>(elements * bytes_each);
        add_values(op, shape_.tokens * values);
    }
    void add_values(PassOperator op, int64_t count) {
        at(op).activation_bytes += static_cast<double>(count * element_.activation);
    }

    void add_attention() {
        const int64_t hidden = config_.hidden_size;
        const int64_t qkv = config_.q_width() + 2 * config_.kv_width();
        add_values(PassOperator::kNorm, 2 * 2 * shape_.tokens * hidden);
        add_product(PassOperator::kQkv, hidden * qkv, element_.weight, hidden + qkv);
        add_values(PassOperator::kQkvPost, 2 * shape_.tokens * qkv);
        OperatorCost& attention = at(PassOperator::kAttention);
        attention.fmas += 2 * static_cast<double>(shape_.attended * config_.q_width());  // q k^T and p v
        attention.bytes += static_cast<double>(shape_.cached_slots * 2 * config_.kv_width() * element_.kv);
        add_values(PassOperator::kAttention, 2 * shape_.tokens * config_.q_width());
        add_product(PassOperator::kAttentionOut, hidden * config_.q_width(), element_.weight,
                    config_.q_width() + 2 * hidden);
    }
    void add_dense() {
        add_product(PassOperator::kDenseMlp, 3 * config_.hidden_size * config_.intermediate_size,
                    element_.weight, 3 * config_.hidden_size);
    }
    void add_experts() {
        const int64_t hidden = config_.hidden_size;
        add_product(PassOperator::kRouter, hidden * config_.num_experts, element_.plain, hidden);
        add_product(PassOperator::kExperts, 3 * hidden * config_.shared_width(), element_.weight, 3 * hidden);
        at(PassOperator::kExperts).fmas +=
            static_cast<double>(shape_.tokens * config_.num_experts_per_token * expert_size());
    }
    void add_ends() {
        const int64_t hidden = config_.hidden_size;
        at(PassOperator::kEmbed).bytes += static_cast<double>(shape_.tokens * hidden * element_.plain);
        add_values(PassOperator::kEmbed, shape_.tokens * hidden);
        add_values(PassOperator::kNorm, 2 * shape_.tokens * hidden);
        if (shape_.logit_rows > 0) {
            const double head = static_cast<double>(config_.vocab_size * hidden);
            at(PassOperator::kHead).fmas += static_cast<double>(shape_.logit_rows) * head;
            at(PassOperator::kHead).bytes += head * static_cast<double>(element_.plain);
            add_values(PassOperator::kHead, 2 * shape_.logit_rows * config_.vocab_size);  // float32
            add_values(PassOperator::kSample, 2 * shape_.logit_rows * config_.vocab_size);
        }
    }

    const ModelConfig& config_;
    const PassShape& shape_;
    const ModelBytes& element_;
    OperatorCosts costs_{};
};

double fma_rate(PassOperator op, const PassRates& rates) {
    switch (op) {
        case PassOperator::kQkv:
        case PassOperator::kAttentionOut:
        case PassOperator::kDenseMlp:
        case PassOperator::kExperts:
            return rates.quantised_fma_per_s;
        case PassOperator::kAttention:
            return rates.attention_fma_per_s;
        default:
            return rates.fma_per_s;
    }
}

double arithmetic_s(PassOperator op, const OperatorCost& cost, const PassRates& rates) {
    return cost.fmas / fma_rate(op, rates);
}

}  // namespace

OperatorCosts operator_costs(const ModelConfig& config, const PassShape& shape, const ModelBytes& element) {
    return Costs(config, shape, element).sum();
}

PassCost pass_cost(const ModelConfig& config, const PassShape& shape, const ModelBytes& element) {
    PassCost sum;
    for (const OperatorCost& cost : operator_costs(config, shape, element)) {
        sum.fmas += cost.fmas;
        sum.bytes += cost.bytes;
    }
    return sum;
}

double operator_floor_us(PassOperator op, const OperatorCost& cost, const PassRates& rates) {
    const double bytes = cost.bytes + cost.activation_bytes;
    return std::max(bytes / rates.bytes_per_s, arithmetic_s(op, cost, rates)) * 1e6;
}

double pass_floor_us(const OperatorCosts& costs, const PassRates& rates) {
    double bytes = 0;
    double seconds = 0;
    for (size_t op = 0; op < kPassOperators; ++op) {
        bytes += costs[op].bytes;
        seconds += arithmetic_s(static_cast<PassOperator>(op), costs[op], rates);
    }
    return std::max(bytes / rates.bytes_per_s, seconds) * 1e6;
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

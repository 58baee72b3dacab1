// What one forward pass must do at least, operator by operator: multiply-adds, and bytes. Pure arithmetic
// over a model's sizes, for the floors that `tessera bench engine` prints.
#pragma once

#include <array>
#include <cstdint>
#include <span>

#include "model/pass_operator.h"
#include "types/model_config.h"

namespace tessera {

struct PassShape {
    int64_t tokens = 0;
    int64_t logit_rows = 0;
    int64_t attended = 0;  // query-slot pairs of one head: the sum over tokens of the slots that each attends
    int64_t cached_slots = 0;     // slots whose K and V are read or written, over the sequences
    int64_t experts_touched = 0;  // routed experts that some token chose, summed over the layers
};

// Of one element, as the engine holds it.
struct ModelBytes {
    int64_t weight = 2;  // of a projection
    double expert = 0;   // of a routed expert, its scales included; 0: as weight
    int64_t plain = 2;   // of the embedding, the router and the head, which no format quantises
    int64_t kv = 4;
    int64_t activation = 0;  // 0: activations are not counted (they stay in a processor's caches)
};

struct OperatorCost {
    double fmas = 0;
    double bytes = 0;             // weights and KV, each once
    double activation_bytes = 0;  // its inputs and outputs, each once
};
using OperatorCosts = std::array<OperatorCost, kPassOperators>;  // by PassOperator

struct PassCost {
    double fmas = 0;
    double bytes = 0;
};

OperatorCosts operator_costs(const ModelConfig& config, const PassShape& shape, const ModelBytes& element);
// The sum over the operators, without activations.
PassCost pass_cost(const ModelConfig& config, const PassShape& shape, const ModelBytes& element);

// What a machine reaches: multiply-adds a second of the products that an FP8 checkpoint quantises, of
// attention's (which multiplies in the format of its pages), and of the others.
struct PassRates {
    double bytes_per_s = 0;
    double fma_per_s = 0;
    double quantised_fma_per_s = 0;
    double attention_fma_per_s = 0;
};
// Microseconds: the larger of bytes over bandwidth and multiply-adds over their rate.
double operator_floor_us(PassOperator op, const OperatorCost& cost, const PassRates& rates);
double pass_floor_us(const OperatorCosts& costs, const PassRates& rates);

// How many experts of a layer a batch touches. REQUIRES: logits [tokens, experts], bias [experts] or empty.
int64_t count_touched_experts(std::span<const float> logits, std::span<const float> bias,
                              const ModelConfig& config);

}  // namespace tessera

// What one forward pass must do at least: multiply-adds, and bytes of weights and KV that it touches. Pure
// arithmetic over a model's sizes, for the floors that `tessera bench engine` prints.
#pragma once

#include <cstdint>
#include <span>

#include "types/model_config.h"

namespace tessera {

struct PassShape {
    int64_t tokens = 0;
    int64_t logit_rows = 0;
    int64_t attended = 0;  // query-slot pairs of one head: the sum over tokens of the slots that each attends
    int64_t cached_slots = 0;     // slots whose K and V are read or written, over the sequences
    int64_t experts_touched = 0;  // routed experts that some token chose, summed over the layers
};

struct ModelBytes {
    int64_t weight = 2;  // of one element of a weight, as the engine holds it
    int64_t kv = 4;      // of one element of K or V
};

struct PassCost {
    double fmas = 0;
    double bytes = 0;
};

PassCost pass_cost(const ModelConfig& config, const PassShape& shape, const ModelBytes& element);

// How many experts of a layer a batch touches. REQUIRES: logits [tokens, experts], bias [experts] or empty.
int64_t count_touched_experts(std::span<const float> logits, std::span<const float> bias,
                              const ModelConfig& config);

}  // namespace tessera

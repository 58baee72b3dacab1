// The router's weights as the device multiplies them: the sum of two bfloat16, made on the host.
#pragma once

#include <cstdint>
#include <vector>

#include "weights/model_weights.h"

namespace tessera {

// [experts, hidden] bfloat16 each, to 17 bits of a float32 weight together, all bits of a float16 one.
struct RouterParts {
    std::vector<uint16_t> high;  // the weights, rounded
    std::vector<uint16_t> low;   // what they have beyond; empty where that is nothing
};

// `router` is float32, float16 or bfloat16.
RouterParts router_parts(const WeightView& router);

}  // namespace tessera

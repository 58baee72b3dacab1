// For tests: the tiny model with experts as large as groups and blocks of 128 need, and weights of both signs
// (the tiny one's are never negative).
#pragma once

#include <string>
#include <vector>

#include "weights/bind/float_convert.h"
#include "weights/checkpoint/checkpoint_testing.h"

namespace tessera::testing {

struct Sizes {
    int64_t hidden = 0;
    int64_t width = 0;  // of an expert
};

// `section`: of quantization_config; may be empty.
inline std::string sized_config(const Sizes& sizes, const std::string& section) {
    json::Value value = *json::parse(tiny_config());
    value.set("hidden_size", sizes.hidden);
    value.set("moe_intermediate_size", sizes.width);
    value.set("expert_hidden_dim", sizes.width);
    if (!section.empty()) {
        value.set("quantization_config", *json::parse(section));
    }
    return json::dump(value);
}

inline TestTensor random_tensor(const std::string& name, std::vector<int64_t> shape) {
    TestTensor tensor = bfloat16_tensor(name, std::move(shape));
    auto state = static_cast<uint32_t>(std::hash<std::string>{}(name));
    for (size_t i = 0; i < tensor.bytes.size(); i += 2) {
        state = state * 1664525U + 1013904223U;
        const float value =
            (static_cast<float>(state >> 8 & 0xFFF) + static_cast<float>(state >> 20)) / 4096 - 1;
        const uint16_t bits = bfloat16_bits(value);
        std::memcpy(tensor.bytes.data() + i, &bits, 2);
    }
    return tensor;
}

inline std::vector<int64_t> sized_shape(const std::string& name, std::vector<int64_t> shape,
                                        const Sizes& sizes) {
    const bool attention = name.find("self_attn") != std::string::npos;
    if (name.ends_with("_norm.weight") && attention) {  // [head_dim]
    } else if (name.ends_with("eh_proj.weight")) {
        shape = {sizes.hidden, 2 * sizes.hidden};
    } else if (attention && name.ends_with("o_proj.weight")) {
        shape = {sizes.hidden, 16};
    } else if (attention && name.find("_proj") != std::string::npos) {
        shape[1] = sizes.hidden;
    } else {
        for (int64_t& extent : shape) {
            extent = extent == 8 ? sizes.hidden : extent == 4 ? sizes.width : extent;
        }
    }
    return shape;
}

// All tensors of sized_config() in the published layout.
inline TestTensors sized_tensors(const Sizes& sizes) {
    TestTensors tensors;
    for (const auto& [name, tensor] : tiny_tensors()) {
        tensors[name] =
            tensor.dtype == "BF16" ? random_tensor(name, sized_shape(name, tensor.shape, sizes)) : tensor;
    }
    return tensors;
}

}  // namespace tessera::testing

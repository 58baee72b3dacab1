// One element of a checkpoint's tensor, for what is converted at load.
#pragma once

#include <cstdint>
#include <cstring>

#include "ops/common/half.h"
#include "weights/model_weights.h"

namespace tessera {

// As float32, exactly; of e4m3 the code's value, without the scales that lie beside it.
// REQUIRES: float32, float16, bfloat16 or e4m3; index below rows * cols.
inline float weight_value(const WeightView& view, size_t index) {
    const auto* bytes = static_cast<const std::byte*>(view.data);
    if (view.dtype == DType::kFloat32) {
        float value = 0;
        std::memcpy(&value, bytes + 4 * index, sizeof(value));
        return value;
    }
    if (view.dtype == DType::kFloat8E4M3) {
        return e4m3_to_f32(static_cast<uint8_t>(bytes[index]));
    }
    uint16_t bits = 0;
    std::memcpy(&bits, bytes + 2 * index, sizeof(bits));
    return view.dtype == DType::kFloat16 ? f16_to_f32(bits) : bf16_to_f32(bits);
}

}  // namespace tessera

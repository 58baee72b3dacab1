#include "model/device_form/router_parts.h"

#include <algorithm>
#include <cmath>

#include "base/check.h"
#include "model/weight_value.h"
#include "ops/common/half.h"

namespace tessera {
RouterParts router_parts(const WeightView& router) {
    check(router.dtype == DType::kFloat32 || router.dtype == DType::kFloat16 ||
              router.dtype == DType::kBFloat16,
          "router_parts: weights of float32, float16 or bfloat16");
    const auto count = static_cast<size_t>(router.rows * router.cols);
    RouterParts parts;
    parts.high.resize(count);
    parts.low.resize(count);
    for (size_t i = 0; i < count; ++i) {
        const float value = weight_value(router, i);
        parts.high[i] = f32_to_bf16(value);
        const float high = bf16_to_f32(parts.high[i]);
        parts.low[i] = f32_to_bf16(std::isfinite(high) ? value - high : 0.0f);
    }
    if (std::ranges::all_of(parts.low, [](uint16_t bits) { return (bits & 0x7FFF) == 0; })) {
        parts.low.clear();
    }
    return parts;
}

}  // namespace tessera

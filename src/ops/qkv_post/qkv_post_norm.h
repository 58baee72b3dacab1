// What the reference and the kernel of qkv_post share. Private to this operator.
#pragma once

#include <array>
#include <cmath>
#include <cstdint>

#include "base/check.h"
#include "ops/qkv_post/qkv_post.h"

namespace tessera {

inline constexpr int64_t kQkvPageSlots = 64;
inline constexpr int64_t kQkvHeadDimMax = 512;
inline constexpr int64_t kQkvNormLanes = 16;  // interleaved sums of squares: element d goes to lane d % 16

// 1 / sqrt(mean of squares + eps) from the lanes, folded in halves.
inline float qkv_norm_scale(std::array<float, kQkvNormLanes> lanes, int64_t head_dim, float eps) {
    for (size_t width = kQkvNormLanes / 2; width > 0; width /= 2) {
        for (size_t i = 0; i < width; ++i) {
            lanes[i] += lanes[i + width];
        }
    }
    return 1.0f / std::sqrt(lanes[0] / static_cast<float>(head_dim) + eps);
}

inline void check_qkv_post(const QkvPostArgs& args) {
    check(args.head_dim > 0 && args.head_dim % 16 == 0 && args.head_dim <= kQkvHeadDimMax,
          "qkv_post: head_dim must be a multiple of 16, at most 512");
    check(args.kv_dtype == DType::kFloat32 || args.kv_dtype == DType::kBFloat16,
          "qkv_post: kv_dtype must be float32 or bfloat16");
}

}  // namespace tessera

#include <algorithm>
#include <array>
#include <cmath>

#include "base/check.h"
#include "ops/qkv_post/qkv_post.h"

namespace tessera {
namespace {

constexpr int64_t kHalfMax = 256;
constexpr int64_t kTokensPerItem = 32;

}  // namespace

void rope_angles(OpContext& context, const RopeArgs& args) {
    const int64_t half = args.head_dim / 2;
    check(args.head_dim % 2 == 0 && half <= kHalfMax, "rope_angles: head_dim must be even and at most 512");
    std::array<float, kHalfMax> inverse_frequency{};
    for (int64_t i = 0; i < half; ++i) {
        const double exponent = -2.0 * static_cast<double>(i) / static_cast<double>(args.head_dim);
        inverse_frequency[static_cast<size_t>(i)] = static_cast<float>(std::pow(args.theta, exponent));
    }
    const int64_t items = (args.tokens + kTokensPerItem - 1) / kTokensPerItem;
    context.threads.parallel_for(items, [&](int64_t item, int) {
        const int64_t end = std::min(args.tokens, (item + 1) * kTokensPerItem);
        for (int64_t token = item * kTokensPerItem; token < end; ++token) {
            const float position = static_cast<float>(args.positions[token]);
            for (int64_t i = 0; i < half; ++i) {
                const float angle = position * inverse_frequency[static_cast<size_t>(i)];
                args.cos[token * half + i] = std::cos(angle);
                args.sin[token * half + i] = std::sin(angle);
            }
        }
    });
}

}  // namespace tessera

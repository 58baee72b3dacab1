#include <array>
#include <bit>
#include <cmath>

#include "base/check.h"
#include "ops/qkv_post/qkv_post.h"
#include "ops/qkv_post/qkv_post_norm.h"

namespace tessera {
namespace {

uint16_t bfloat16_bits(float value) {
    const uint32_t bits = std::bit_cast<uint32_t>(value);
    if (value != value) {
        return static_cast<uint16_t>((bits >> 16) | 0x40);  // a NaN stays one
    }
    return static_cast<uint16_t>((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
}

// out = rope(norm(in)); in and out may be the same.
void transform(const float* in, const float* norm, const QkvPostArgs& args, int64_t token, float* out) {
    const int64_t half = args.head_dim / 2;
    std::array<float, kQkvNormLanes> squares{};
    for (int64_t d = 0; d < args.head_dim; ++d) {
        float& lane = squares[static_cast<size_t>(d % kQkvNormLanes)];
        lane = std::fma(in[d], in[d], lane);
    }
    const float scale = norm == nullptr ? 1.0f : qkv_norm_scale(squares, args.head_dim, args.eps);
    const float* cos = args.cos + token * half;
    const float* sin = args.sin + token * half;
    for (int64_t i = 0; i < half; ++i) {
        float a = in[i];
        float b = in[i + half];
        if (norm != nullptr) {
            a = a * scale * norm[i];
            b = b * scale * norm[i + half];
        }
        out[i] = a * cos[i] - b * sin[i];
        out[i + half] = b * cos[i] + a * sin[i];
    }
}

void store(const float* values, const QkvPostArgs& args, const KvTarget& target, int64_t block_offset,
           int64_t kv_head) {
    const int64_t first = (kv_head * kQkvPageSlots + target.slot) * args.head_dim;
    std::byte* block = target.page + block_offset;
    for (int64_t d = 0; d < args.head_dim; ++d) {
        if (args.kv_dtype == DType::kBFloat16) {
            reinterpret_cast<uint16_t*>(block)[first + d] = bfloat16_bits(values[d]);
        } else {
            reinterpret_cast<float*>(block)[first + d] = values[d];
        }
    }
}

}  // namespace

void qkv_post_ref(const QkvPostArgs& args) {
    check_qkv_post(args);
    std::array<float, kQkvHeadDimMax> k{};
    for (int64_t token = 0; token < args.tokens; ++token) {
        for (int64_t head = 0; head < args.q_heads; ++head) {
            float* q = args.q + token * args.q_stride + head * args.head_dim;
            transform(q, args.q_norm, args, token, q);
        }
        for (int64_t head = 0; head < args.kv_heads; ++head) {
            const KvTarget& target = args.targets[token];
            transform(args.k + token * args.k_stride + head * args.head_dim, args.k_norm, args, token,
                      k.data());
            store(k.data(), args, target, args.k_offset, head);
            store(args.v + token * args.v_stride + head * args.head_dim, args, target, args.v_offset, head);
        }
    }
}

}  // namespace tessera

#include <algorithm>

#include "ops/common/simd_targets.h"
#include "ops/qkv_post/qkv_post.h"
#include "ops/qkv_post/qkv_post_norm.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/qkv_post/qkv_post_cpu.cc"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

HWY_BEFORE_NAMESPACE();
namespace tessera {
namespace HWY_NAMESPACE {
namespace {
#if HWY_TARGET == HWY_SCALAR

void run_tokens(const QkvPostArgs&, int64_t, int64_t) {}

#else

namespace hn = hwy::HWY_NAMESPACE;

// 16 lanes whatever the vector width: the sum's order is part of the operator's contract.
float norm_scale(const float* in, int64_t head_dim, float eps) {
    const hn::CappedTag<float, 16> d;
    constexpr int kParts = HWY_TARGET == HWY_AVX2 ? 2 : 1;
    hn::Vec<decltype(d)> sums[kParts];
    for (auto& sum : sums) {
        sum = hn::Zero(d);
    }
    const size_t lanes = hn::Lanes(d);
    for (int64_t i = 0; i < head_dim; i += kQkvNormLanes) {
        for (int part = 0; part < kParts; ++part) {
            const auto v = hn::LoadU(d, in + i + part * lanes);
            sums[part] = hn::MulAdd(v, v, sums[part]);
        }
    }
    std::array<float, kQkvNormLanes> folded;
    for (int part = 0; part < kParts; ++part) {
        hn::StoreU(sums[part], d, folded.data() + part * lanes);
    }
    return qkv_norm_scale(folded, head_dim, eps);
}

struct Angles {
    const float* cos = nullptr;  // [head_dim / 2]
    const float* sin = nullptr;
};

// One head's elements; in and out may be the same.
struct Head {
    const float* in = nullptr;
    const float* norm = nullptr;  // its weights; null = no norm
    float* out = nullptr;
};

// Vectors of D divide half a head.
template <class D>
void transform_by(D d, const Head& head, const QkvPostArgs& args, const Angles& angles) {
    const int64_t half = args.head_dim / 2;
    const auto lanes = static_cast<int64_t>(hn::Lanes(d));
    const float scale = head.norm == nullptr ? 1.0f : norm_scale(head.in, args.head_dim, args.eps);
    const auto s = hn::Set(d, scale);
    for (int64_t i = 0; i < half; i += lanes) {
        auto a = hn::LoadU(d, head.in + i);
        auto b = hn::LoadU(d, head.in + i + half);
        if (head.norm != nullptr) {
            a = hn::Mul(hn::Mul(a, s), hn::LoadU(d, head.norm + i));
            b = hn::Mul(hn::Mul(b, s), hn::LoadU(d, head.norm + i + half));
        }
        const auto cos = hn::LoadU(d, angles.cos + i);
        const auto sin = hn::LoadU(d, angles.sin + i);
        hn::StoreU(hn::Sub(hn::Mul(a, cos), hn::Mul(b, sin)), d, head.out + i);
        hn::StoreU(hn::Add(hn::Mul(b, cos), hn::Mul(a, sin)), d, head.out + i + half);
    }
}

// head_dim / 2 is a multiple of 8.
void transform(const Head& head, const QkvPostArgs& args, const Angles& angles) {
    if (args.head_dim % 32 == 0) {
        transform_by(hn::CappedTag<float, 16>(), head, args, angles);
    } else {
        transform_by(hn::CappedTag<float, 8>(), head, args, angles);
    }
}

// Rounds to the nearest bfloat16, ties to even; a NaN stays a NaN.
void store_bfloat16(const float* values, int64_t count, uint16_t* out) {
    const hn::CappedTag<float, 8> d;
    const hn::RebindToUnsigned<decltype(d)> du32;
    const hn::Rebind<uint16_t, decltype(d)> du16;
    for (int64_t i = 0; i < count; i += 8) {
        const auto value = hn::LoadU(d, values + i);
        const auto bits = hn::BitCast(du32, value);
        const auto odd = hn::And(hn::ShiftRight<16>(bits), hn::Set(du32, 1));
        const auto rounded = hn::ShiftRight<16>(hn::Add(hn::Add(bits, hn::Set(du32, 0x7FFF)), odd));
        const auto nan = hn::Or(hn::ShiftRight<16>(bits), hn::Set(du32, 0x40));
        const auto is_nan = hn::RebindMask(du32, hn::IsNaN(value));
        hn::StoreU(hn::TruncateTo(du16, hn::IfThenElse(is_nan, nan, rounded)), du16, out + i);
    }
}

void store(const float* values, const QkvPostArgs& args, const KvTarget& target, int64_t index) {
    const bool is_key = index % 2 == 0;
    const int64_t first = (index / 2 * kQkvPageSlots + target.slot) * args.head_dim;
    std::byte* block = target.page + (is_key ? args.k_offset : args.v_offset);
    if (args.kv_dtype == DType::kBFloat16) {
        store_bfloat16(values, args.head_dim, reinterpret_cast<uint16_t*>(block) + first);
    } else {
        std::copy_n(values, args.head_dim, reinterpret_cast<float*>(block) + first);
    }
}

void run_tokens(const QkvPostArgs& args, int64_t begin, int64_t end) {
    const int64_t half = args.head_dim / 2;
    alignas(64) float k[kQkvHeadDimMax];
    for (int64_t token = begin; token < end; ++token) {
        const Angles angles{args.cos + token * half, args.sin + token * half};
        for (int64_t head = 0; head < args.q_heads; ++head) {
            float* q = args.q + token * args.q_stride + head * args.head_dim;
            transform({q, args.q_norm, q}, args, angles);
        }
        for (int64_t head = 0; head < args.kv_heads; ++head) {
            const int64_t column = head * args.head_dim;
            transform({args.k + token * args.k_stride + column, args.k_norm, k}, args, angles);
            store(k, args, args.targets[token], 2 * head);
            store(args.v + token * args.v_stride + column, args, args.targets[token], 2 * head + 1);
        }
    }
}

#endif  // HWY_TARGET == HWY_SCALAR
bool has_kernels() {
    return HWY_TARGET != HWY_SCALAR;
}
}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace tessera
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace tessera {
namespace {

constexpr int64_t kTokensPerItem = 4;  // about a microsecond of work

}  // namespace

HWY_EXPORT(run_tokens);
HWY_EXPORT(has_kernels);

void qkv_post(OpContext& context, const QkvPostArgs& args) {
    check_qkv_post(args);
    if (!HWY_DYNAMIC_DISPATCH(has_kernels)()) {
        qkv_post_ref(args);
        return;
    }
    const auto kernel = HWY_DYNAMIC_DISPATCH(run_tokens);
    const int64_t items = (args.tokens + kTokensPerItem - 1) / kTokensPerItem;
    context.threads.parallel_for(items, [&](int64_t item, int) {
        kernel(args, item * kTokensPerItem, std::min(args.tokens, (item + 1) * kTokensPerItem));
    });
}

}  // namespace tessera
#endif  // HWY_ONCE

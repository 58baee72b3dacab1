#include "ops/common/simd_targets.h"
#include "ops/rms_norm/rms_norm.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/rms_norm/rms_norm_cpu.cc"
#include <hwy/foreach_target.h>
//
#include <algorithm>
#include <cmath>
#include <hwy/highway.h>

HWY_BEFORE_NAMESPACE();
namespace tessera {
namespace HWY_NAMESPACE {
namespace {  // each file has its own

#if HWY_TARGET == HWY_SCALAR

void rms_norm_simd(const RmsNormArgs& args) {
    rms_norm_ref(args);
}

#else

namespace hn = hwy::HWY_NAMESPACE;
using Tag = hn::CappedTag<float, 16>;
using Vector = hn::Vec<Tag>;
constexpr int64_t kLanes = static_cast<int64_t>(hn::MaxLanes(Tag()));
constexpr int kParts = static_cast<int>(16 / kLanes);  // vectors that hold the 16 chains

float sum_of_squares(const float* x, int64_t width) {
    const Tag d;
    Vector sums[kParts];
    for (Vector& sum : sums) {
        sum = hn::Zero(d);
    }
    int64_t k = 0;
    for (; k + 16 <= width; k += 16) {
        for (int p = 0; p < kParts; ++p) {
            const Vector v = hn::LoadU(d, x + k + p * kLanes);
            sums[p] = hn::MulAdd(v, v, sums[p]);
        }
    }
    alignas(64) float chains[16];
    for (int p = 0; p < kParts; ++p) {
        hn::Store(sums[p], d, chains + p * kLanes);
    }
    for (int i = 0; k + i < width; ++i) {
        chains[i] = std::fma(x[k + i], x[k + i], chains[i]);
    }
    for (int half = 8; half >= 1; half /= 2) {
        for (int i = 0; i < half; ++i) {
            chains[i] += chains[i + half];
        }
    }
    return chains[0];
}

void rms_norm_simd(const RmsNormArgs& args) {
    const Tag d;
    for (int64_t r = 0; r < args.rows; ++r) {
        const float* x = args.x + r * args.x_stride;
        float* y = args.y + r * args.y_stride;
        const float mean = sum_of_squares(x, args.width) / static_cast<float>(args.width);
        const float scale = 1.0f / std::sqrt(mean + args.eps);
        int64_t k = 0;
        for (; k + kLanes <= args.width; k += kLanes) {
            const Vector v = hn::Mul(hn::LoadU(d, x + k), hn::Set(d, scale));
            hn::StoreU(hn::Mul(v, hn::LoadU(d, args.weight + k)), d, y + k);
        }
        for (; k < args.width; ++k) {
            y[k] = x[k] * scale * args.weight[k];
        }
    }
}

#endif

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace tessera
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace tessera {
namespace {

constexpr int64_t kItemFloats = 2048;  // of one parallel item: about a microsecond, half of it fetching rows

}  // namespace

HWY_EXPORT(rms_norm_simd);

void rms_norm(const OpContext& context, const RmsNormArgs& args) {
    const int64_t rows = std::max<int64_t>(1, kItemFloats / std::max<int64_t>(1, args.width));
    const int64_t items = (args.rows + rows - 1) / rows;
    context.threads.parallel_for(items, [&](int64_t item, int) {
        RmsNormArgs part = args;
        part.x += item * rows * args.x_stride;
        part.y += item * rows * args.y_stride;
        part.rows = std::min(rows, args.rows - item * rows);
        HWY_DYNAMIC_DISPATCH(rms_norm_simd)(part);
    });
}

}  // namespace tessera
#endif

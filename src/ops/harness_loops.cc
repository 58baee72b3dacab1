#include "ops/harness_loops.h"

#include "ops/common/simd_targets.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "ops/harness_loops.cc"
#include <hwy/foreach_target.h>
#include <hwy/highway.h>

HWY_BEFORE_NAMESPACE();
namespace tessera {
namespace HWY_NAMESPACE {
namespace {

namespace hn = hwy::HWY_NAMESPACE;

// The results go to *sink, so that no compiler may leave the loops out.
int64_t fma_chains(int64_t iterations, float* sink) {
    const hn::ScalableTag<float> d;
    // Ten chains that start apart, or the compiler would see that they are one.
    auto a0 = hn::Iota(d, 0);
    auto a1 = hn::Iota(d, 1);
    auto a2 = hn::Iota(d, 2);
    auto a3 = hn::Iota(d, 3);
    auto a4 = hn::Iota(d, 4);
    auto a5 = hn::Iota(d, 5);
    auto a6 = hn::Iota(d, 6);
    auto a7 = hn::Iota(d, 7);
    auto a8 = hn::Iota(d, 8);
    auto a9 = hn::Iota(d, 9);
    const auto x = hn::Set(d, 0.999f);
    const auto y = hn::Set(d, 0.001f);
    for (int64_t i = 0; i < iterations; ++i) {  // two units, four or five cycles each
        a0 = hn::MulAdd(a0, x, y);
        a1 = hn::MulAdd(a1, x, y);
        a2 = hn::MulAdd(a2, x, y);
        a3 = hn::MulAdd(a3, x, y);
        a4 = hn::MulAdd(a4, x, y);
        a5 = hn::MulAdd(a5, x, y);
        a6 = hn::MulAdd(a6, x, y);
        a7 = hn::MulAdd(a7, x, y);
        a8 = hn::MulAdd(a8, x, y);
        a9 = hn::MulAdd(a9, x, y);
    }
    const auto left = hn::Add(hn::Add(hn::Add(a0, a1), hn::Add(a2, a3)), hn::Add(a4, a5));
    *sink = hn::GetLane(hn::Add(left, hn::Add(hn::Add(a6, a7), hn::Add(a8, a9))));
    return iterations * 10 * static_cast<int64_t>(hn::Lanes(d));
}

void read_lines(const float* data, int64_t count, float* sink) {
    const hn::ScalableTag<float> d;
    const int64_t lanes = static_cast<int64_t>(hn::Lanes(d));
    auto a = hn::Zero(d);
    auto b = a, c = a, e = a;
    int64_t i = 0;
    for (; i + 4 * lanes <= count; i += 4 * lanes) {
        a = hn::Add(a, hn::LoadU(d, data + i));
        b = hn::Add(b, hn::LoadU(d, data + i + lanes));
        c = hn::Add(c, hn::LoadU(d, data + i + 2 * lanes));
        e = hn::Add(e, hn::LoadU(d, data + i + 3 * lanes));
    }
    *sink = hn::GetLane(hn::Add(hn::Add(a, b), hn::Add(c, e)));
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace tessera
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace tessera {

HWY_EXPORT(fma_chains);
HWY_EXPORT(read_lines);

int64_t fma_loop(int64_t iterations) {
    float sink = 0;
    return HWY_DYNAMIC_DISPATCH(fma_chains)(iterations, &sink);
}

void read_loop(const std::byte* data, int64_t bytes) {
    float sink = 0;
    HWY_DYNAMIC_DISPATCH(read_lines)(reinterpret_cast<const float*>(data), bytes / 4, &sink);
}

}  // namespace tessera
#endif  // HWY_ONCE

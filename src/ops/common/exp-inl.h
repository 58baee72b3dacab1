// The vector twin of exp.h, compiled once per Highway target: include inside a file that uses
// foreach_target.h.
#if defined(TESSERA_OPS_COMMON_EXP_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef TESSERA_OPS_COMMON_EXP_INL_H_
#undef TESSERA_OPS_COMMON_EXP_INL_H_
#else
#define TESSERA_OPS_COMMON_EXP_INL_H_
#endif

#include <hwy/highway.h>

#include "ops/common/exp.h"

HWY_BEFORE_NAMESPACE();
namespace tessera {
namespace HWY_NAMESPACE {
#if HWY_TARGET != HWY_SCALAR

namespace hn = hwy::HWY_NAMESPACE;

// D is a float32 tag. The operand order of Max and Min lets a NaN through, as exp_f32 does.
template <class D, class V = hn::Vec<D>>
HWY_INLINE V exp_simd(D d, V x) {
    using C = ExpConstants;
    const hn::RebindToSigned<D> di;
    x = hn::Max(hn::Set(d, C::kMin), x);
    x = hn::Min(hn::Set(d, C::kMax), x);
    const V round = hn::Set(d, C::kRound);
    const V shifted = hn::MulAdd(x, hn::Set(d, C::kLog2E), round);
    const V n = hn::Sub(shifted, round);
    const auto exponent = hn::Sub(hn::BitCast(di, shifted), hn::BitCast(di, round));
    V r = hn::MulAdd(n, hn::Set(d, -C::kLn2High), x);
    r = hn::MulAdd(n, hn::Set(d, -C::kLn2Low), r);
    V p = hn::Set(d, C::kPoly[7]);
    p = hn::MulAdd(p, r, hn::Set(d, C::kPoly[6]));
    p = hn::MulAdd(p, r, hn::Set(d, C::kPoly[5]));
    p = hn::MulAdd(p, r, hn::Set(d, C::kPoly[4]));
    p = hn::MulAdd(p, r, hn::Set(d, C::kPoly[3]));
    p = hn::MulAdd(p, r, hn::Set(d, C::kPoly[2]));
    p = hn::MulAdd(p, r, hn::Set(d, C::kPoly[1]));
    p = hn::MulAdd(p, r, hn::Set(d, C::kPoly[0]));
    const auto bias = hn::Set(di, 127);
    const auto half = hn::ShiftRight<1>(exponent);
    const auto rest = hn::Sub(exponent, half);
    const V scale_a = hn::BitCast(d, hn::ShiftLeft<23>(hn::Add(half, bias)));
    const V scale_b = hn::BitCast(d, hn::ShiftLeft<23>(hn::Add(rest, bias)));
    return hn::Mul(hn::Mul(p, scale_a), scale_b);
}

template <class D, class V = hn::Vec<D>>
HWY_INLINE V sigmoid_simd(D d, V x) {
    const V one = hn::Set(d, 1.0f);
    return hn::Div(one, hn::Add(one, exp_simd(d, hn::Neg(x))));
}

template <class D, class V = hn::Vec<D>>
HWY_INLINE V silu_simd(D d, V x) {
    return hn::Div(x, hn::Add(hn::Set(d, 1.0f), exp_simd(d, hn::Neg(x))));
}

#endif  // HWY_TARGET != HWY_SCALAR
}  // namespace HWY_NAMESPACE
}  // namespace tessera
HWY_AFTER_NAMESPACE();

#endif  // TESSERA_OPS_COMMON_EXP_INL_H_

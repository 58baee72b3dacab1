// exp, sigmoid and silu in float32: one sequence of operations, written here for scalars and in exp-inl.h for
// vectors, so that both give the same bits on every machine. The error of exp_f32 is below 1 ulp
// (exp_test.cc).
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

namespace tessera {

// exp(x) = 2^n p(r), n = round(x log2 e), r = x - n ln 2 in two parts, p a polynomial of degree 7 on |r| <=
// 0.347. Adding 1.5 * 2^23 rounds to an integer (ties to even) and leaves it in the low mantissa bits.
struct ExpConstants {
    static constexpr float kMin = -104.0f;  // exp rounds to 0 below
    static constexpr float kMax = 89.0f;    // and to infinity above
    static constexpr float kLog2E = 1.44269504088896341f;
    static constexpr float kLn2High = 0.693145751953125f;
    static constexpr float kLn2Low = 1.42860682030941723e-6f;
    static constexpr float kRound = 12582912.0f;
    static constexpr int kDegree = 7;
    static constexpr float kPoly[kDegree + 1] = {
        1.0f, 1.0f, 0.5f, 0.166666672f, 0.0416664854f, 0.0083333608f, 0.00139304355f, 0.000198527618f};
};

inline float exp_f32(float x) {
    using C = ExpConstants;
    if (x != x) {
        return x;
    }
    x = C::kMin > x ? C::kMin : x;
    x = C::kMax < x ? C::kMax : x;
    const float shifted = std::fma(x, C::kLog2E, C::kRound);
    const float n = shifted - C::kRound;
    const int32_t exponent = std::bit_cast<int32_t>(shifted) - std::bit_cast<int32_t>(C::kRound);
    float r = std::fma(n, -C::kLn2High, x);
    r = std::fma(n, -C::kLn2Low, r);
    float p = C::kPoly[C::kDegree];
    for (int i = C::kDegree - 1; i >= 0; --i) {
        p = std::fma(p, r, C::kPoly[i]);
    }
    // 2^n in two factors: n reaches from -150 to 128, beyond the range of one normal number.
    const int32_t half = exponent >> 1;
    const float scale_a = std::bit_cast<float>((half + 127) << 23);
    const float scale_b = std::bit_cast<float>((exponent - half + 127) << 23);
    return p * scale_a * scale_b;
}

inline float sigmoid_f32(float x) {
    return 1.0f / (1.0f + exp_f32(-x));
}
inline float silu_f32(float x) {
    return x / (1.0f + exp_f32(-x));
}

}  // namespace tessera

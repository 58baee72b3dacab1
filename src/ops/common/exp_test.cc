#include "ops/common/exp.h"

#include <gtest/gtest.h>
#include <limits>

namespace tessera {
namespace {

TEST(Exp, ErrorIsBelowOneUlpOverTheNormalRange) {
    double worst = 0;
    for (float x = -87.0f; x < 88.5f; x += 0.00037f) {
        const double exact = std::exp(static_cast<double>(x));
        const double ulp = std::ldexp(1.0, std::ilogb(exact) - 23);
        worst = std::max(worst, std::fabs(static_cast<double>(exp_f32(x)) - exact) / ulp);
    }
    EXPECT_LT(worst, 1.0);
}

TEST(Exp, EndsAndSpecialValues) {
    const float infinity = std::numeric_limits<float>::infinity();
    EXPECT_EQ(exp_f32(0.0f), 1.0f);
    EXPECT_EQ(exp_f32(-infinity), 0.0f);
    EXPECT_EQ(exp_f32(infinity), infinity);
    EXPECT_EQ(exp_f32(1000.0f), infinity);
    EXPECT_GT(exp_f32(-100.0f), 0.0f);  // subnormal
    EXPECT_TRUE(std::isnan(exp_f32(std::numeric_limits<float>::quiet_NaN())));
    EXPECT_EQ(sigmoid_f32(0.0f), 0.5f);
    EXPECT_EQ(sigmoid_f32(200.0f), 1.0f);
    EXPECT_EQ(silu_f32(0.0f), 0.0f);
    EXPECT_TRUE(std::isnan(silu_f32(std::numeric_limits<float>::quiet_NaN())));
}

}  // namespace
}  // namespace tessera

#include "weights/bind/float_convert.h"

#include <cmath>
#include <gtest/gtest.h>
#include <limits>

namespace tessera {
namespace {

TEST(FloatConvert, BFloat16) {
    EXPECT_EQ(float_from_bfloat16(0x3F80), 1.0F);
    EXPECT_EQ(float_from_bfloat16(0xC000), -2.0F);
    EXPECT_TRUE(std::isinf(float_from_bfloat16(0x7F80)));
}

TEST(FloatConvert, Float16) {
    EXPECT_EQ(float_from_float16(0x3C00), 1.0F);
    EXPECT_EQ(float_from_float16(0xC000), -2.0F);
    EXPECT_EQ(float_from_float16(0x7BFF), 65504.0F);
    EXPECT_EQ(float_from_float16(0x0001), std::ldexp(1.0F, -24));
    EXPECT_EQ(float_from_float16(0x83FF), -std::ldexp(1023.0F, -24));
    EXPECT_TRUE(std::signbit(float_from_float16(0x8000)));
    EXPECT_EQ(float_from_float16(0xFC00), -std::numeric_limits<float>::infinity());
    EXPECT_TRUE(std::isnan(float_from_float16(0x7E00)));
}

TEST(FloatConvert, WidensAView) {
    const uint16_t bits[] = {0x3F80, 0x4000, 0x4040};
    float wide[3] = {};
    widen({bits, DType::kBFloat16, 1, 3}, wide);
    EXPECT_EQ(wide[0], 1.0F);
    EXPECT_EQ(wide[1], 2.0F);
    EXPECT_EQ(wide[2], 3.0F);
}

}  // namespace
}  // namespace tessera

#include "ops/common/half.h"

#include <gtest/gtest.h>
#include <limits>

namespace tessera {
namespace {

TEST(Half, Bf16RoundsToNearestEven) {
    EXPECT_EQ(f32_to_bf16(1.0f), 0x3F80);
    EXPECT_EQ(f32_to_bf16(std::bit_cast<float>(0x3F808000u)), 0x3F80);  // a tie, to even
    EXPECT_EQ(f32_to_bf16(std::bit_cast<float>(0x3F818000u)), 0x3F82);  // a tie, to even
    EXPECT_EQ(f32_to_bf16(std::bit_cast<float>(0x3F808001u)), 0x3F81);
    EXPECT_EQ(f32_to_bf16(std::numeric_limits<float>::infinity()), 0x7F80);
    EXPECT_TRUE(std::isnan(bf16_to_f32(f32_to_bf16(std::bit_cast<float>(0x7F800001u)))));
}

TEST(Half, F16CoversSubnormalsInfinityAndNan) {
    EXPECT_EQ(f16_to_f32(0x3C00), 1.0f);
    EXPECT_EQ(f16_to_f32(0xC000), -2.0f);
    EXPECT_EQ(f16_to_f32(0x0001), 0x1p-24f);
    EXPECT_EQ(f16_to_f32(0x83FF), -1023 * 0x1p-24f);
    EXPECT_EQ(f16_to_f32(0x7BFF), 65504.0f);
    EXPECT_EQ(f16_to_f32(0x7C00), std::numeric_limits<float>::infinity());
    EXPECT_TRUE(std::isnan(f16_to_f32(0x7E00)));
}

TEST(Half, E4m3CoversAllValues) {
    EXPECT_EQ(e4m3_to_f32(0x38), 1.0f);
    EXPECT_EQ(e4m3_to_f32(0x7E), 448.0f);
    EXPECT_EQ(e4m3_to_f32(0x01), 0x1p-9f);
    EXPECT_EQ(e4m3_to_f32(0x88), -0x1p-6f);
    EXPECT_TRUE(std::isnan(e4m3_to_f32(0x7F)));
    EXPECT_TRUE(std::isnan(e4m3_to_f32(0xFF)));
    for (int bits = 0; bits < 256; ++bits) {
        const float value = e4m3_to_f32(static_cast<uint8_t>(bits));
        if (!std::isnan(value)) {
            EXPECT_EQ(round_to_e4m3(value), value);
        }
    }
}

// Between two neighbours everything goes to the nearer one, and a tie to the one with the even last bit.
TEST(Half, RoundToE4m3IsNearestEven) {
    for (int bits = 0; bits < 0x7E; ++bits) {
        const float low = e4m3_to_f32(static_cast<uint8_t>(bits));
        const float high = e4m3_to_f32(static_cast<uint8_t>(bits + 1));
        const float middle = (low + high) / 2;
        EXPECT_EQ(round_to_e4m3(middle), bits % 2 == 0 ? low : high);
        EXPECT_EQ(round_to_e4m3(std::nextafter(middle, 0.0f)), low);
        EXPECT_EQ(round_to_e4m3(std::nextafter(middle, 1e9f)), high);
        EXPECT_EQ(round_to_e4m3(-std::nextafter(middle, 1e9f)), -high);
    }
    EXPECT_EQ(round_to_e4m3(1e30f), 448.0f);
    EXPECT_EQ(round_to_e4m3(-std::numeric_limits<float>::infinity()), -448.0f);
    EXPECT_TRUE(std::isnan(round_to_e4m3(std::numeric_limits<float>::quiet_NaN())));
}

}  // namespace
}  // namespace tessera

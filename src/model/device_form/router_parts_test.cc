#include "model/device_form/router_parts.h"

#include <bit>
#include <cmath>
#include <gtest/gtest.h>
#include <limits>
#include <random>

#include "ops/common/half.h"

namespace tessera {
namespace {

constexpr int64_t kExperts = 6;
constexpr int64_t kHidden = 40;

template <typename T>
WeightView view_of(const std::vector<T>& values, DType dtype) {
    return {values.data(), dtype, kExperts, static_cast<int64_t>(values.size()) / kExperts};
}

// With magnitudes of any kind from 2^-14 to 2^4.
std::vector<float> random_floats() {
    std::mt19937 random(3);
    std::uniform_real_distribution<float> exponent(-14, 4);
    std::vector<float> values;
    for (int64_t i = 0; i < kExperts * kHidden; ++i) {
        values.push_back(std::exp2(exponent(random)) * (random() % 2 == 0 ? 1.0f : -1.0f));
    }
    return values;
}

// high + low against the weight, at most `relative` of it apart; high is the nearest bfloat16.
void expect_parts(const RouterParts& parts, const std::vector<float>& want, double relative) {
    ASSERT_EQ(parts.high.size(), want.size());
    ASSERT_TRUE(parts.low.empty() || parts.low.size() == want.size());
    for (size_t i = 0; i < want.size(); ++i) {
        EXPECT_EQ(parts.high[i], f32_to_bf16(want[i]));
        const double low = parts.low.empty() ? 0 : static_cast<double>(bf16_to_f32(parts.low[i]));
        const double sum = static_cast<double>(bf16_to_f32(parts.high[i])) + low;
        EXPECT_LE(std::fabs(sum - static_cast<double>(want[i])), relative * std::fabs(want[i])) << want[i];
    }
}

TEST(RouterParts, float32_has_a_low_part_and_17_bits) {
    const std::vector<float> values = random_floats();
    const RouterParts parts = router_parts(view_of(values, DType::kFloat32));
    EXPECT_FALSE(parts.low.empty());
    expect_parts(parts, values, 0x1p-17);
}

TEST(RouterParts, float16_has_a_low_part_and_all_its_bits) {
    std::vector<uint16_t> halves;
    std::vector<float> values;
    // Subnormal numbers too, but no infinity.
    for (uint32_t i = 0; i < kExperts * kHidden; ++i) {
        halves.push_back(static_cast<uint16_t>((i * 40503 + 1) & (i % 2 == 0 ? 0xFBFF : 0x3FF)));
        values.push_back(f16_to_f32(halves.back()));
    }
    const RouterParts parts = router_parts(view_of(halves, DType::kFloat16));
    EXPECT_FALSE(parts.low.empty());
    expect_parts(parts, values, 0);
}

TEST(RouterParts, what_bfloat16_holds_has_no_low_part) {
    std::vector<float> values = random_floats();
    std::vector<uint16_t> bits;
    for (float& value : values) {
        bits.push_back(f32_to_bf16(value));
        value = bf16_to_f32(bits.back());
    }
    for (const RouterParts& parts :
         {router_parts(view_of(bits, DType::kBFloat16)), router_parts(view_of(values, DType::kFloat32))}) {
        EXPECT_TRUE(parts.low.empty());
        EXPECT_EQ(parts.high, bits);
    }
    // float16 with no more than bfloat16's bits: 1, -2, 0.5, and zeros.
    const std::vector<uint16_t> few{0x3C00, 0xC000, 0x3800, 0, 0x8000, 0};
    EXPECT_TRUE(router_parts(view_of(few, DType::kFloat16)).low.empty());
}

TEST(RouterParts, one_weight_beyond_bfloat16_needs_the_low_part) {
    std::vector<float> values(kExperts * kHidden, 0.5f);
    values[77] = std::nextafter(0.5f, 1.0f);
    const RouterParts parts = router_parts(view_of(values, DType::kFloat32));
    ASSERT_EQ(parts.low.size(), values.size());
    for (size_t i = 0; i < values.size(); ++i) {
        EXPECT_EQ(bf16_to_f32(parts.low[i]), i == 77 ? 0x1p-24f : 0.0f);
    }
}

TEST(RouterParts, what_is_not_finite_stays_so) {
    const float infinity = std::numeric_limits<float>::infinity();
    const std::vector<float> values{infinity, -infinity, std::nanf(""), 3.4e38f, 1, 0x1.01p0f};
    const RouterParts parts = router_parts(view_of(values, DType::kFloat32));
    ASSERT_EQ(parts.low.size(), values.size());
    EXPECT_EQ(bf16_to_f32(parts.high[0]), infinity);
    EXPECT_EQ(bf16_to_f32(parts.high[1]), -infinity);
    EXPECT_TRUE(std::isnan(bf16_to_f32(parts.high[2])));
    for (size_t i = 0; i < 4; ++i) {
        EXPECT_EQ(parts.low[i] & 0x7FFF, 0) << i;
    }
}

}  // namespace
}  // namespace tessera

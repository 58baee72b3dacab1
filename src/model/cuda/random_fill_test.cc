#include "model/cuda/random_fill.h"

#include <algorithm>
#include <cmath>
#include <cstring>
#include <gtest/gtest.h>

#include "model/cuda/step_kernels.h"
#include "ops/common/cuda/device_testing.h"

namespace tessera {
namespace {

constexpr uint64_t kSeed = 11;

std::vector<float> widened(const std::vector<uint8_t>& bytes, DType dtype) {
    std::vector<float> values;
    const auto size = static_cast<size_t>(dtype_size(dtype));
    for (size_t i = 0; i < bytes.size(); i += size) {
        if (dtype == DType::kFloat8E4M3) {
            values.push_back(e4m3_to_f32(bytes[i]));
        } else if (dtype == DType::kBFloat16) {
            values.push_back(bf16_to_f32(static_cast<uint16_t>(bytes[i] | bytes[i + 1] << 8)));
        } else {
            float value = 0;
            std::memcpy(&value, &bytes[i], 4);
            values.push_back(value);
        }
    }
    return values;
}

// `count` elements and the 16 bytes behind them.
std::vector<uint8_t> filled(DType dtype, int64_t count, float mean, float deviation) {
    DeviceArena arena;
    auto* to = arena.poisoned<uint8_t>(count * dtype_size(dtype) + 16);
    random_fill_cuda(
        nullptr,
        {.to = to, .count = count, .dtype = dtype, .seed = kSeed, .mean = mean, .deviation = deviation});
    return DeviceArena::download(to, count * dtype_size(dtype) + 16);
}

class RandomFill : public ::testing::TestWithParam<DType> {};

TEST_P(RandomFill, an_element_depends_on_its_index_alone_and_nothing_else_is_written) {
    const auto size = static_cast<size_t>(dtype_size(GetParam()));
    const std::vector<uint8_t> longest = filled(GetParam(), 5000, 0, 1);
    for (const int64_t count : {1, 2, 3, 63, 1025, 4097}) {
        const std::vector<uint8_t> bytes = filled(GetParam(), count, 0, 1);
        const size_t end = static_cast<size_t>(count) * size;
        EXPECT_TRUE(
            std::equal(bytes.begin(), bytes.begin() + static_cast<std::ptrdiff_t>(end), longest.begin()))
            << count;
        for (size_t i = end; i < bytes.size(); ++i) {
            EXPECT_EQ(bytes[i], 0xFF) << count;
        }
    }
}

TEST_P(RandomFill, has_the_mean_and_deviation_asked_for) {
    constexpr int64_t kCount = 1 << 18;
    std::vector<uint8_t> bytes = filled(GetParam(), kCount, 3, 20);
    bytes.resize(static_cast<size_t>(kCount * dtype_size(GetParam())));
    double sum = 0;
    double squares = 0;
    float largest = 0;
    for (const float value : widened(bytes, GetParam())) {
        sum += static_cast<double>(value);
        squares += static_cast<double>(value * value);
        largest = std::fmax(largest, std::fabs(value - 3));
    }
    const double mean = sum / kCount;
    EXPECT_NEAR(mean, 3, 0.25);
    EXPECT_NEAR(std::sqrt(squares / kCount - mean * mean), 20, 0.25);
    EXPECT_LE(largest, 3.6f * 20);  // 3.47, rounded to three bits of mantissa
}

INSTANTIATE_TEST_SUITE_P(DTypes, RandomFill,
                         ::testing::Values(DType::kFloat8E4M3, DType::kBFloat16, DType::kFloat32));

TEST(MarkExperts, flags_the_chosen_ones_and_no_others) {
    DeviceArena arena;
    const std::vector<int32_t> chosen = {5, 0, -1, 191, 5, 192, 63};
    uint8_t* touched = arena.upload(std::vector<uint8_t>(192, 0));
    mark_experts_cuda(nullptr, {.chosen = arena.upload(chosen),
                                .count = static_cast<int64_t>(chosen.size()),
                                .experts = 192,
                                .touched = touched});
    const std::vector<uint8_t> flags = DeviceArena::download(touched, 192);
    for (size_t i = 0; i < flags.size(); ++i) {
        const bool wanted = i == 0 || i == 5 || i == 63 || i == 191;
        EXPECT_EQ(flags[i], wanted ? 1 : 0) << i;
    }
}

}  // namespace
}  // namespace tessera

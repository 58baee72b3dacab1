#include "ops/rms_norm/rms_norm.h"

#include <gtest/gtest.h>

#include "ops/op_testing.h"
#include "ops/rms_norm/rms_norm_cases.h"

namespace tessera {
namespace {

using RmsNormTest = OpTest;

TEST_F(RmsNormTest, EveryCaseEqualsTheReferenceOnEveryInstructionSet) {
    expect_reference_bits(rms_norm_cases(), false);
}

TEST_F(RmsNormTest, TheReferenceIsTheFormula) {
    RmsNormCase data(3, 100);
    rms_norm_ref(data.args());
    for (int64_t r = 0; r < 3; ++r) {
        const float* x = data.x.data() + r * 103;
        double sum = 0;
        for (int64_t k = 0; k < 100; ++k) {
            sum += static_cast<double>(x[k]) * x[k];
        }
        for (int64_t k = 0; k < 100; ++k) {
            const double want = data.weight[static_cast<size_t>(k)] * (x[k] / std::sqrt(sum / 100 + 1e-5));
            EXPECT_NEAR(data.y[static_cast<size_t>(r * 100 + k)], want, 1e-6);
        }
    }
}

TEST_F(RmsNormTest, WorksInPlaceAndOnZeros) {
    std::vector<float> x(64, 0.0f);
    x[40] = 2;
    const std::vector<float> weight(32, 1.0f);
    RmsNormArgs args{.x = x.data(),
                     .x_stride = 32,
                     .weight = weight.data(),
                     .y = x.data(),
                     .y_stride = 32,
                     .rows = 2,
                     .width = 32,
                     .eps = 1e-5f};
    rms_norm(context_, args);
    EXPECT_EQ(x[5], 0.0f);
    EXPECT_NEAR(x[40], std::sqrt(32.0), 1e-3);
}

}  // namespace
}  // namespace tessera

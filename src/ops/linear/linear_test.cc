#include "ops/linear/linear.h"

#include <gtest/gtest.h>

#include "ops/linear/linear_cases.h"
#include "ops/op_testing.h"

namespace tessera {
namespace {

using LinearTest = OpTest;

TEST_F(LinearTest, EveryCaseEqualsTheReferenceOnEveryInstructionSet) {
    expect_reference_bits(linear_cases(), false);
}

// The reference itself, against the checkpoint's matrix in float64.
TEST_F(LinearTest, TheReferenceIsAMatrixProduct) {
    for (DType dtype : {DType::kBFloat16, DType::kFloat16, DType::kFloat32, DType::kFloat8E4M3}) {
        LinearCase data({2, {.outputs = 33, .inputs = 65, .dtype = dtype, .scale = 0.5f}});
        linear_ref(data.args());
        const double scale = dtype == DType::kFloat8E4M3 ? 0.5 : 1.0;
        for (int64_t r = 0; r < 2; ++r) {
            for (int64_t n = 0; n < 33; ++n) {
                double sum = 0;
                double size = 0;
                for (int64_t k = 0; k < 65; ++k) {
                    const double term = static_cast<double>(data.x()[static_cast<size_t>(r * 65 + k)]) *
                                        data.matrix().value(n, k) * scale;
                    sum += term;
                    size += std::fabs(term);
                }
                EXPECT_NEAR(data.y()[static_cast<size_t>(r * 33 + n)], sum, 1e-6 * size) << dtype_name(dtype);
            }
        }
    }
}

// Blocks of scales, and rows of x as e4m3 with a scale of their own.
TEST_F(LinearTest, TheReferenceScalesBlocksAndRows) {
    constexpr int64_t kOutputs = 150;
    constexpr int64_t kInputs = 300;
    LinearCase data({2,
                     {.outputs = kOutputs,
                      .inputs = kInputs,
                      .dtype = DType::kFloat8E4M3,
                      .scale = 0.5f,
                      .input_dynamic = true,
                      .blocks = true}});
    linear_ref(data.args());
    for (int64_t r = 0; r < 2; ++r) {
        const float* x = data.x().data() + (r * kInputs);
        float largest = 0;
        for (int64_t k = 0; k < kInputs; ++k) {
            largest = std::fmax(largest, std::fabs(x[k]));
        }
        const float in = largest / 448;
        for (int64_t n = 0; n < kOutputs; ++n) {
            double sum = 0;
            double size = 0;
            for (int64_t k = 0; k < kInputs; ++k) {
                const double term = static_cast<double>(round_to_e4m3(x[k] / in)) * in *
                                    data.matrix().value(n, k) * data.matrix().block_scale(n, k);
                sum += term;
                size += std::fabs(term);
            }
            EXPECT_NEAR(data.y()[static_cast<size_t>(r * kOutputs + n)], sum, 1e-6 * size) << r << ", " << n;
        }
    }
}

TEST_F(LinearTest, ARowsBitsDependOnNeitherCompanyNorThreads) {
    const RandomMatrixSpec plain{.outputs = 300, .inputs = 129};
    RandomMatrixSpec blocks = plain;
    blocks.dtype = DType::kFloat8E4M3;
    blocks.blocks = blocks.input_dynamic = true;
    for (const RandomMatrixSpec& spec : {plain, blocks}) {
        LinearCase data({200, spec});
        LinearArgs args = data.args();
        linear(context_, args);
        const std::vector<float> together = data.y();
        ThreadPool one(1);
        for (int64_t r = 0; r < 200; ++r) {
            LinearArgs alone = args;
            alone.rows = 1;
            alone.x += r * alone.x_stride;
            alone.y += r * alone.y_stride;
            linear({one}, alone);
        }
        EXPECT_EQ(together, data.y());
    }
}

// An activation of 1.05 input scales is e4m3 1.0 in the emulation, and stays 1.05 without it.
TEST_F(LinearTest, StaticScalesRoundTheActivations) {
    const uint8_t one = 0x38;
    const MatrixSource source{&one, DType::kFloat8E4M3, 1, 1, 3.0f};
    alignas(64) uint32_t words[16] = {};
    float scales[16] = {};
    PackedMatrix matrix{.data = reinterpret_cast<std::byte*>(words),
                        .outputs = 16,
                        .inputs = 1,
                        .column_scale = scales,
                        .input_scale = 2.0f};
    std::byte scratch[256];
    pack_panel(matrix, 0, {&source, 0, 1}, scratch);
    const float x = 2.1f;
    float y = 0;
    LinearArgs args{
        .x = &x, .x_stride = 1, .rows = 1, .weight = &matrix, .y = &y, .y_stride = 1, .outputs = 1};
    linear(context_, args);
    EXPECT_EQ(y, 6.0f);
    matrix.input_scale = 0;
    linear(context_, args);
    EXPECT_EQ(y, 2.1f * 3.0f);
}

}  // namespace
}  // namespace tessera

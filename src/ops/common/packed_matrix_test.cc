#include "ops/common/packed_matrix.h"

#include <gtest/gtest.h>

#include "ops/common/random_matrix.h"

namespace tessera {
namespace {

constexpr DType kDtypes[] = {DType::kBFloat16, DType::kFloat16, DType::kFloat32, DType::kFloat8E4M3};

TEST(PackedMatrix, HoldsEveryWeightExactlyAndZerosPastTheOutputs) {
    OpRandom random(1);
    for (DType dtype : kDtypes) {
        for (const auto& [outputs, inputs] :
             {std::pair<int64_t, int64_t>{1, 1}, {16, 2}, {63, 65}, {65, 127}, {129, 64}}) {
            const RandomMatrix matrix({.outputs = outputs, .inputs = inputs, .dtype = dtype}, random);
            ASSERT_EQ(matrix.packed().outputs, (outputs + 15) / 16 * 16);
            for (int64_t n = 0; n < matrix.packed().outputs; ++n) {
                for (int64_t k = 0; k < inputs; ++k) {
                    ASSERT_EQ(packed_weight(matrix.packed(), n, k), n < outputs ? matrix.value(n, k) : 0.0f)
                        << dtype_name(dtype) << " " << outputs << "x" << inputs << " at " << n << ", " << k;
                }
            }
        }
    }
}

TEST(PackedMatrix, AlternatesThePanelsOfTwoHalves) {
    OpRandom random(2);
    const RandomMatrix matrix({.outputs = 80, .inputs = 6, .alternate = true},
                              random);  // two halves of 40: 16, 16, 8
    ASSERT_EQ(matrix.packed().outputs, 96);
    for (int64_t n = 0; n < 96; ++n) {
        const int64_t row = n / 32 * 16 + n % 16;
        const int64_t output = n / 16 % 2 * 40 + row;
        for (int64_t k = 0; k < 6; ++k) {
            ASSERT_EQ(packed_weight(matrix.packed(), n, k), row < 40 ? matrix.value(output, k) : 0.0f);
        }
    }
}

TEST(PackedMatrix, KeepsTheScaleOfAnFp8WeightPerColumn) {
    OpRandom random(3);
    const RandomMatrix matrix({.outputs = 32, .inputs = 8, .dtype = DType::kFloat8E4M3, .scale = 0.25f},
                              random);
    ASSERT_NE(matrix.packed().column_scale, nullptr);
    for (int64_t n = 0; n < 32; ++n) {
        EXPECT_EQ(matrix.packed().column_scale[n], 0.25f);
    }
}

TEST(PackedMatrix, SpreadsBlockScalesOverOutputsAndZerosPastThem) {
    OpRandom random(4);
    for (const bool alternate : {false, true}) {
        const RandomMatrix matrix({.outputs = 300,
                                   .inputs = 257,
                                   .dtype = DType::kFloat8E4M3,
                                   .alternate = alternate,
                                   .blocks = true},
                                  random);
        const PackedMatrix& packed = matrix.packed();
        ASSERT_EQ(packed.column_scale, nullptr);
        ASSERT_EQ(packed.groups(), 3);
        const int64_t parts = alternate ? 2 : 1;
        const int64_t rows = 300 / parts;
        for (int64_t n = 0; n < packed.outputs; ++n) {
            const int64_t panel = n / 16;
            const int64_t row = panel / parts * 16 + n % 16;
            for (int64_t g = 0; g < 3; ++g) {
                EXPECT_EQ(packed.group_scale[g * packed.outputs + n],
                          row < rows ? matrix.block_scale(panel % parts * rows + row, g * 128) : 0.0f)
                    << n << ", " << g;
            }
        }
    }
}

}  // namespace
}  // namespace tessera

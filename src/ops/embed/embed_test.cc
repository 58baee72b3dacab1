#include "ops/embed/embed.h"

#include <gtest/gtest.h>
#include <limits>
#include <vector>

#include "ops/common/half.h"
#include "ops/embed/embed_cases.h"

namespace tessera {
namespace {

TEST(Embed, WidensTheRowsOfTheTokens) {
    ThreadPool threads(2);
    const int64_t width = 63;
    std::vector<uint16_t> table(static_cast<size_t>(10 * width));
    for (size_t i = 0; i < table.size(); ++i) {
        table[i] = static_cast<uint16_t>(0x3C00 + i);
    }
    std::vector<int32_t> tokens;
    for (int32_t i = 0; i < 129; ++i) {
        tokens.push_back(i * 7 % 10);
    }
    for (DType dtype : {DType::kBFloat16, DType::kFloat16}) {
        std::vector<float> y(tokens.size() * 65, std::numeric_limits<float>::quiet_NaN());
        embed({threads}, {.table = table.data(),
                          .dtype = dtype,
                          .width = width,
                          .tokens = tokens.data(),
                          .rows = 129,
                          .y = y.data(),
                          .y_stride = 65});
        for (size_t r = 0; r < tokens.size(); ++r) {
            for (size_t i = 0; i < 63; ++i) {
                const uint16_t bits = table[static_cast<size_t>(tokens[r]) * 63 + i];
                ASSERT_EQ(y[r * 65 + i], dtype == DType::kBFloat16 ? bf16_to_f32(bits) : f16_to_f32(bits));
            }
            ASSERT_TRUE(std::isnan(y[r * 65 + 63]));  // nothing past the width
        }
    }
}

TEST(Embed, EveryCaseEqualsTheReference) {
    ThreadPool threads(3);
    OpContext context{threads};
    for (const OpCase& c : embed_cases()) {
        const OpError error = c.prepare().check(context);
        EXPECT_GT(error.compared, 0);
        EXPECT_EQ(error.mismatches, 0) << c.shape << " " << c.dtype;
    }
}

}  // namespace
}  // namespace tessera

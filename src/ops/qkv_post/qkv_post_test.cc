#include "ops/qkv_post/qkv_post.h"

#include <cmath>
#include <gtest/gtest.h>

#include "ops/op_testing.h"
#include "ops/qkv_post/qkv_post_cases.h"

namespace tessera {
namespace {

using QkvPostTest = OpTest;

TEST_F(QkvPostTest, EveryCaseEqualsTheReferenceOnEveryInstructionSet) {
    expect_reference_bits(qkv_post_cases(), true);
}

// The reference itself, in float64: norm, then rotation of the pair (i, i + head_dim / 2).
TEST_F(QkvPostTest, TheReferenceNormsThenRotates) {
    QkvPostCase data({.tokens = 2, .q_heads = 1, .kv_heads = 1, .head_dim = 32});
    const QkvPostArgs args = data.args();
    qkv_post_ref(args);
    for (int64_t t = 0; t < 2; ++t) {
        const float* raw = data.start().data() + t * args.q_stride;
        const auto* page = reinterpret_cast<const float*>(args.targets[t].page + args.k_offset);
        const auto* v_page = reinterpret_cast<const float*>(args.targets[t].page + args.v_offset);
        for (int64_t part = 0; part < 2; ++part) {  // q, then k
            const float* in = raw + part * 32;
            const float* norm = part == 0 ? args.q_norm : args.k_norm;
            const float* out = part == 0 ? args.q + t * args.q_stride : page + args.targets[t].slot * 32;
            double squares = 0;
            for (int64_t d = 0; d < 32; ++d) {
                squares += static_cast<double>(in[d]) * in[d];
            }
            const double scale = 1 / std::sqrt(squares / 32 + 1e-5);
            for (int64_t i = 0; i < 16; ++i) {
                const double a = in[i] * scale * norm[i];
                const double b = in[i + 16] * scale * norm[i + 16];
                const double cos = args.cos[t * 16 + i];
                const double sin = args.sin[t * 16 + i];
                EXPECT_NEAR(out[i], a * cos - b * sin, 1e-5);
                EXPECT_NEAR(out[i + 16], b * cos + a * sin, 1e-5);
            }
        }
        for (int64_t d = 0; d < 32; ++d) {
            EXPECT_EQ(v_page[args.targets[t].slot * 32 + d], raw[64 + d]);
        }
    }
}

TEST_F(QkvPostTest, BFloat16RoundsToNearestEven) {
    QkvPostCase data(
        {.tokens = 1, .q_heads = 1, .kv_heads = 1, .head_dim = 16, .kv_dtype = DType::kBFloat16});
    // 1 + 2^-8 and 1 + 3 * 2^-8 lie halfway between two neighbours; a NaN and an infinity stay what they are.
    const std::vector<float> v = {1.00390625f, 1.01171875f, -1.00390625f, NAN, INFINITY, 3.5f};
    std::copy(v.begin(), v.end(), data.start().begin() + 32);
    const QkvPostArgs args = data.args();
    qkv_post(context_, args);
    const auto* page = reinterpret_cast<const uint16_t*>(args.targets[0].page + args.v_offset) + 5 * 16;
    EXPECT_EQ(page[0], 0x3F80);
    EXPECT_EQ(page[1], 0x3F82);
    EXPECT_EQ(page[2], 0xBF80);
    EXPECT_GT(page[3] & 0x7FFF, 0x7F80);
    EXPECT_EQ(page[4], 0x7F80);
    EXPECT_EQ(page[5], 0x4060);
}

TEST_F(QkvPostTest, AnglesAreFloat32Products) {
    const std::vector<int32_t> positions = {0, 1, 1800, 262143};
    std::vector<float> cos(4 * 64);
    std::vector<float> sin(4 * 64);
    rope_angles(context_, {positions.data(), 4, 128, 11158840.0, cos.data(), sin.data()});
    for (size_t t = 0; t < 4; ++t) {
        for (size_t i = 0; i < 64; ++i) {
            const float frequency =
                static_cast<float>(std::pow(11158840.0, -2.0 * static_cast<double>(i) / 128));
            const float angle = static_cast<float>(positions[t]) * frequency;
            EXPECT_NEAR(cos[t * 64 + i], std::cos(static_cast<double>(angle)), 1e-7);
            EXPECT_NEAR(sin[t * 64 + i], std::sin(static_cast<double>(angle)), 1e-7);
        }
    }
}

}  // namespace
}  // namespace tessera

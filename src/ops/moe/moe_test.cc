#include "ops/moe/moe.h"

#include <gtest/gtest.h>

#include "ops/moe/moe_cases.h"
#include "ops/op_testing.h"

namespace tessera {
namespace {

using MoeTest = OpTest;

TEST_F(MoeTest, EveryCaseEqualsTheReferenceOnEveryInstructionSet) {
    std::vector<OpCase> cases = moe_cases();
    const std::vector<OpCase> dense = swiglu_cases();
    cases.insert(cases.end(), dense.begin(), dense.end());
    expect_reference_bits(cases, false);
}

TEST_F(MoeTest, ATokensBitsDependOnNeitherCompanyNorThreads) {
    const MoeCaseSpec plain{
        .tokens = 230, .hidden = 96, .experts = 7, .k = 3, .width = 40, .shared_width = 24};
    MoeCaseSpec blocks = plain;
    blocks.width = 150;
    blocks.dtype = DType::kFloat8E4M3;
    blocks.blocks = blocks.input_dynamic = true;
    for (const MoeCaseSpec& spec : {plain, blocks}) {
        MoeCase data(spec);
        const MoeArgs args = data.args();
        moe(context_, args);
        const std::vector<float> together = data.y();
        const MoeArgs again = data.args();
        ThreadPool one(1);
        for (int64_t t = 0; t < 230; ++t) {
            MoeArgs alone = again;
            alone.tokens = 1;
            alone.x += t * alone.x_stride;
            alone.y += t * alone.y_stride;
            alone.chosen += t * alone.k;
            alone.weights += t * alone.k;
            moe({one}, alone);
        }
        EXPECT_EQ(together, data.y());
    }
}

// One expert of width 1 over one input, by hand: y += w * (silu(g x) * u x) * d.
TEST_F(MoeTest, TheReferenceIsTheFormula) {
    const float gate_up[2] = {0.5f, -2.0f};
    const float down = 3.0f;
    OpRandom random(1);
    RandomMatrix gu({.outputs = 2, .inputs = 1, .dtype = DType::kFloat32, .alternate = true}, random);
    RandomMatrix d({.outputs = 1, .inputs = 1, .dtype = DType::kFloat32}, random);
    reinterpret_cast<float*>(gu.packed().data)[0] = gate_up[0];
    reinterpret_cast<float*>(gu.packed().data)[16] = gate_up[1];
    reinterpret_cast<float*>(d.packed().data)[0] = down;
    const ExpertWeights expert{gu.packed(), d.packed()};
    const float x = 1.5f;
    const float weight = 0.25f;
    const int32_t chosen = 0;
    float y = 10.0f;
    MoeArgs args{.x = &x,
                 .x_stride = 1,
                 .tokens = 1,
                 .hidden = 1,
                 .experts = {&expert, 1},
                 .k = 1,
                 .chosen = &chosen,
                 .weights = &weight,
                 .shared = &expert,
                 .y = &y,
                 .y_stride = 1};
    moe_ref(args);
    const double g = 0.75;
    const double out = g / (1 + std::exp(-g)) * -3.0 * 3.0;
    EXPECT_NEAR(y, 10.0 + 0.25 * out + out, 1e-5);
}

}  // namespace
}  // namespace tessera

#include "model/device_form/grouped_experts.h"

#include <cstring>
#include <gtest/gtest.h>

#include "ops/common/half.h"
#include "ops/moe/w4_layout.h"
#include "ops/moe/w8_layout.h"
#include "weights/w4a8_testing.h"

namespace tessera {
namespace {

using w4a8_testing::Form;
using w4a8_testing::Read;

// Rows of a packed matrix, found as the layout says where they lie.
struct Packed {
    const std::vector<uint8_t>& units;
    int64_t inputs = 0;

    int code(int64_t unit, int64_t row, int64_t input) const {
        const W4Place place = w4_place(row, input);
        return w4_code(units[at(unit, place.byte)] >> place.shift & 15);
    }
    uint16_t scale(int64_t unit, int64_t row, int64_t input) const {
        uint16_t bits = 0;
        std::memcpy(&bits, &units[at(unit, w4_place(row, input).scale)], sizeof(bits));
        return bits;
    }

  private:
    size_t at(int64_t unit, int64_t byte) const {
        return static_cast<size_t>(unit * w4_unit_bytes(inputs) + byte);
    }
};

// How many codes and scales of a unit's row are not those of the weight's row.
int64_t differences(const Packed& packed, int64_t unit, int64_t unit_row, const Read& want, int64_t row) {
    int64_t count = 0;
    for (int64_t k = 0; k < want.cols; ++k) {
        const uint16_t scale = want.scales[static_cast<size_t>((row * want.cols + k) / kInt4Group)];
        count += packed.code(unit, unit_row, k) != want.code(row, k);
        count += packed.scale(unit, unit_row, k) != scale;
    }
    return count;
}

void expect_packed(const PackedExpert& packed, const MlpWeights& want) {
    const Read gate(want.gate);
    const Read up(want.up);
    const Read down(want.down);
    ASSERT_EQ(packed.gate_up.size(), static_cast<size_t>(w4_gate_up_bytes(gate.cols, gate.rows)));
    ASSERT_EQ(packed.down.size(), static_cast<size_t>(w4_down_bytes(gate.cols, gate.rows)));
    const Packed gate_up{packed.gate_up, gate.cols};
    int64_t wrong = 0;
    for (int64_t output = 0; output < gate.rows; ++output) {
        const int64_t row = grouped_gate_row(output);
        wrong += differences(gate_up, output / 32, row, gate, output);
        wrong += differences(gate_up, output / 32, row + 8, up, output);
    }
    const Packed downs{packed.down, down.cols};
    for (int64_t output = 0; output < down.rows; ++output) {
        wrong += differences(downs, output / kGroupedUnitRows, output % kGroupedUnitRows, down, output);
    }
    EXPECT_EQ(wrong, 0);
}

TEST(Int4Experts, the_four_forms_are_packed_into_the_same_weights) {
    const w4a8_testing::Exported exported;
    const std::vector<MlpWeights>& want = exported.model->weights.layers[1].moe->experts;
    ThreadPool pool(2);
    PackedExpert packed;
    for (const Form form :
         {Form::kGptq, Form::kTrtLlm, Form::kPacked, Form::kPackedSigned, Form::kModelOpt}) {
        SCOPED_TRACE(static_cast<int>(form));
        const testing::TempFolder folder;
        const Result<LoadedModel> model =
            w4a8_testing::load(folder, section_of(form), int4_tensors(exported, form));
        ASSERT_TRUE(model.ok()) << model.status().message();
        const std::vector<MlpWeights>& experts = model->weights.layers[1].moe->experts;
        ASSERT_TRUE(int4_experts_fit(experts));
        ASSERT_EQ(experts.size(), want.size());
        for (size_t e = 0; e < experts.size(); ++e) {
            pack_int4_expert(experts[e], pool, packed);
            expect_packed(packed, want[e]);
        }
    }
}

TEST(Int4Experts, experts_that_the_kernel_cannot_take_do_not_fit) {
    const w4a8_testing::Exported exported;
    std::vector<MlpWeights> experts = exported.model->weights.layers[1].moe->experts;
    EXPECT_TRUE(int4_experts_fit(experts));
    experts[1].up.int4.reset();
    EXPECT_FALSE(int4_experts_fit(experts));
    EXPECT_FALSE(int4_experts_fit({}));
}

TEST(Int4Experts, backends_without_int4_get_code_times_scale) {
    const w4a8_testing::Exported exported;
    const LinearWeights& linear = exported.model->weights.layers[1].moe->experts[2].down;
    const Read read(linear);
    std::vector<uint16_t> values;
    int4_to_bf16(linear, values);
    ASSERT_EQ(values.size(), static_cast<size_t>(read.rows * read.cols));
    int64_t wrong = 0;
    for (int64_t i = 0; i < read.rows * read.cols; ++i) {
        const float scale = bf16_to_f32(read.scales[static_cast<size_t>(i / kInt4Group)]);
        const auto code = static_cast<float>(read.code(i / read.cols, i % read.cols));
        wrong += values[static_cast<size_t>(i)] != f32_to_bf16(code * scale);
    }
    EXPECT_EQ(wrong, 0);
}

// One of [width 192, hidden 256], whose blocks of down end early.
struct BlockExpert {
    BlockExpert() {
        uint32_t state = 1;
        for (int i = 0; i < 3; ++i) {
            for (uint8_t& code : codes[i]) {
                state = state * 1664525U + 1013904223U;
                code = static_cast<uint8_t>(state >> 24);
            }
            for (float& scale : scales[i]) {
                scale = static_cast<float>(++count);
            }
        }
    }
    LinearWeights linear(int i, int64_t rows, int64_t cols) const {
        return {.weight = {codes[i].data(), DType::kFloat8E4M3, rows, cols},
                .blocks = Fp8Blocks{scales[i].data()}};
    }
    MlpWeights weights() const { return {linear(0, 192, 256), linear(1, 192, 256), linear(2, 256, 192)}; }

    int count = 0;
    std::vector<uint8_t> codes[3] = {std::vector<uint8_t>(192 * 256), std::vector<uint8_t>(192 * 256),
                                     std::vector<uint8_t>(192 * 256)};
    std::vector<float> scales[3] = {std::vector<float>(4), std::vector<float>(4), std::vector<float>(4)};
};

// How many weights and scales of a unit's row are not those of the weight's row.
int64_t differences(const uint8_t* unit, int64_t unit_row, const LinearWeights& want, int64_t row) {
    const int64_t cols = want.weight.cols;
    int64_t count = 0;
    for (int64_t k = 0; k < cols; ++k) {
        const W8Place place = w8_place(unit_row, k);
        float scale = 0;
        std::memcpy(&scale, unit + place.scale, sizeof(scale));
        count += unit[place.byte] != static_cast<const uint8_t*>(want.weight.data)[row * cols + k];
        count += scale != want.blocks->scales[row / 128 * ((cols + 127) / 128) + k / 128];
    }
    return count;
}

TEST(BlockExperts, are_packed_with_the_scales_of_their_blocks) {
    const BlockExpert expert;
    const MlpWeights want = expert.weights();
    ASSERT_TRUE(block_experts_fit({want}));
    ThreadPool pool(2);
    PackedExpert packed;
    pack_block_expert(want, pool, packed);
    ASSERT_EQ(packed.gate_up.size(), static_cast<size_t>(w8_gate_up_bytes(256, 192)));
    ASSERT_EQ(packed.down.size(), static_cast<size_t>(w8_down_bytes(256, 192)));
    int64_t wrong = 0;
    for (int64_t output = 0; output < 192; ++output) {
        const uint8_t* unit = packed.gate_up.data() + output / 32 * w8_unit_bytes(256);
        wrong += differences(unit, grouped_gate_row(output), want.gate, output);
        wrong += differences(unit, grouped_gate_row(output) + 8, want.up, output);
    }
    for (int64_t output = 0; output < 256; ++output) {
        const uint8_t* unit = packed.down.data() + output / kGroupedUnitRows * w8_unit_bytes(192);
        wrong += differences(unit, output % kGroupedUnitRows, want.down, output);
    }
    EXPECT_EQ(wrong, 0);
}

TEST(BlockExperts, that_the_kernel_cannot_take_do_not_fit) {
    const BlockExpert expert;
    std::vector<MlpWeights> experts = {expert.weights(), expert.weights()};
    EXPECT_TRUE(block_experts_fit(experts));
    EXPECT_FALSE(int4_experts_fit(experts));
    experts[1].down.blocks.reset();
    EXPECT_FALSE(block_experts_fit(experts));
    experts[1] = expert.weights();
    for (LinearWeights* linear : {&experts[1].gate, &experts[1].up}) {
        linear->weight.cols = 192;  // hidden must be groups of 128
    }
    EXPECT_FALSE(block_experts_fit(experts));
}

}  // namespace
}  // namespace tessera

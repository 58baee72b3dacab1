#include "model/device_form/int4_experts.h"

#include <cstring>
#include <gtest/gtest.h>

#include "ops/common/half.h"
#include "ops/moe/w4_layout.h"
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

void expect_packed(const PackedInt4Expert& packed, const MlpWeights& want) {
    const Read gate(want.gate);
    const Read up(want.up);
    const Read down(want.down);
    ASSERT_EQ(packed.gate_up.size(), static_cast<size_t>(w4_gate_up_bytes(gate.cols, gate.rows)));
    ASSERT_EQ(packed.down.size(), static_cast<size_t>(w4_down_bytes(gate.cols, gate.rows)));
    const Packed gate_up{packed.gate_up, gate.cols};
    int64_t wrong = 0;
    for (int64_t output = 0; output < gate.rows; ++output) {
        const int64_t row = w4_gate_row(output);
        wrong += differences(gate_up, output / 32, row, gate, output);
        wrong += differences(gate_up, output / 32, row + 8, up, output);
    }
    const Packed downs{packed.down, down.cols};
    for (int64_t output = 0; output < down.rows; ++output) {
        wrong += differences(downs, output / kW4UnitRows, output % kW4UnitRows, down, output);
    }
    EXPECT_EQ(wrong, 0);
}

TEST(Int4Experts, the_four_forms_are_packed_into_the_same_weights) {
    const w4a8_testing::Exported exported;
    const std::vector<MlpWeights>& want = exported.model->weights.layers[1].moe->experts;
    ThreadPool pool(2);
    PackedInt4Expert packed;
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

}  // namespace
}  // namespace tessera

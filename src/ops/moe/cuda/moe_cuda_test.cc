#include "ops/moe/cuda/moe_cuda.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <gtest/gtest.h>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "device/cuda/graph.h"
#include "device/cuda/stream.h"
#include "ops/common/cuda/device_testing.h"

namespace tessera {
namespace {

struct Shape {
    int64_t tokens, hidden, experts, k, width, shared_width;
    bool fp8;
    bool same_input_scale = true;
    bool padding = false;  // every third token has no experts
    bool hot = false;      // every token chooses expert 0
    bool nobody = false;   // no token has experts
    bool late = false;     // the first half of the tokens has none
};

std::string name_of(const Shape& s) {
    return "T" + std::to_string(s.tokens) + " H" + std::to_string(s.hidden) + " E" +
           std::to_string(s.experts) + " k" + std::to_string(s.k) + " F" + std::to_string(s.width) + "+" +
           std::to_string(s.shared_width) + (s.fp8 ? " fp8" : " bf16");
}

// One layer's data on the host and on the device.
class Case {
  public:
    explicit Case(const Shape& shape)
        : shape_(shape), random_(static_cast<uint32_t>(shape.tokens * 7 + shape.hidden)) {
        const float deviation = 1.0f / std::sqrt(static_cast<float>(shape.hidden));
        x_ = random_values(random_, shape.tokens * shape.hidden, 1, false);
        y_ = random_values(random_, shape.tokens * shape.hidden, 1, false);
        const float stored = shape.fp8 ? 1.0f : deviation;
        gate_up_ = random_values(random_, shape.experts * 2 * shape.width * shape.hidden, stored, shape.fp8);
        down_ = random_values(random_, shape.experts * shape.hidden * shape.width, stored, shape.fp8);
        shared_gate_up_ = random_values(random_, 2 * shape.shared_width * shape.hidden, stored, shape.fp8);
        shared_down_ = random_values(random_, shape.hidden * shape.shared_width, stored, shape.fp8);
        std::uniform_real_distribution<float> spread(0.5f, 1.5f);
        for (int64_t i = 0; i < 2 * shape.experts + 2; ++i) {
            gate_up_scale_.push_back(shape.fp8 ? deviation * spread(random_) : 1);
        }
        for (int64_t i = 0; i < shape.experts + 1; ++i) {
            down_scale_.push_back(shape.fp8 ? deviation * spread(random_) : 1);
            down_input_scale_.push_back(shape.fp8 ? 0.02f * spread(random_) : 1);
        }
        choose();
    }

    // y after the layer. T = double: rounded where inputs of products are. T = float: plain loops with all
    // roundings that the operator states; unfused: those of gate and up, too, which a chain of products
    // stores in bfloat16 between its kernels.
    template <typename T = double>
    std::vector<T> reference(bool unfused = false) const {
        std::vector<T> want;
        for (int64_t t = 0; t < shape_.tokens; ++t) {
            std::vector<T> sum(static_cast<size_t>(shape_.hidden));
            for (int64_t i = 0; i < shape_.k; ++i) {
                const auto at = static_cast<size_t>(t * shape_.k + i);
                if (chosen_[at] >= 0) {
                    const std::vector<T> out = expert<T>(t, chosen_[at], unfused);
                    for (size_t h = 0; h < sum.size(); ++h) {
                        sum[h] += static_cast<T>(weights_[at]) * rounded(out[h]);
                    }
                }
            }
            if (shape_.shared_width > 0) {
                const std::vector<T> out = expert<T>(t, static_cast<int32_t>(shape_.experts), unfused);
                for (size_t h = 0; h < sum.size(); ++h) {
                    sum[h] = rounded(sum[h]) + rounded(out[h]);
                }
            }
            for (size_t h = 0; h < sum.size(); ++h) {
                const auto at = static_cast<size_t>(t * shape_.hidden) + h;
                want.push_back(rounded(y_.values[at] + rounded(sum[h])));
            }
        }
        return want;
    }

    // `tokens` < the case's: the first ones alone. calls: so many before, in the same workspace, every third
    // of all tokens.
    std::vector<float> run(int64_t tokens, bool graph, bool batch_invariant = false, int calls = 0) {
        DeviceArena arena;
        Stream stream;
        const auto place = [&](const TestValues& v) -> const void* {
            return shape_.fp8 ? static_cast<const void*>(arena.upload(v.fp8)) : arena.upload(v.bf16);
        };
        const auto routed = static_cast<size_t>(shape_.experts);
        const float* gate_up_scale = arena.upload(gate_up_scale_);
        const float* down_scale = arena.upload(down_scale_);
        const float* down_input_scale = arena.upload(down_input_scale_);
        const MoeCudaWeights weights =
            moe_cuda_bind({.dtype = shape_.fp8 ? DType::kFloat8E4M3 : DType::kBFloat16,
                           .hidden = shape_.hidden,
                           .experts = shape_.experts,
                           .width = shape_.width,
                           .shared_width = shape_.shared_width,
                           .gate_up = place(gate_up_),
                           .down = place(down_),
                           .shared_gate_up = place(shared_gate_up_),
                           .shared_down = place(shared_down_),
                           .gate_up_scale = gate_up_scale,
                           .down_scale = down_scale,
                           .down_input_scale = down_input_scale,
                           .shared_gate_up_scale = gate_up_scale + 2 * routed,
                           .shared_down_scale = down_scale + routed,
                           .shared_down_input_scale = down_input_scale + routed,
                           .input_scale = input_scale(0),
                           .shared_input_scale = input_scale(shape_.experts)});
        uint16_t* y = arena.upload(y_.bf16);
        const MoeCudaArgs args{.weights = &weights,
                               .x = arena.upload(x_.bf16),
                               .tokens = tokens,
                               .k = shape_.k,
                               .chosen = arena.upload(chosen_),
                               .expert_weights = arena.upload(weights_),
                               .y = y,
                               .workspace = arena.poisoned<std::byte>(
                                   moe_cuda_workspace_bytes(weights.tensors, shape_.tokens, shape_.k)),
                               .sm_count = device_sm_count(),
                               .batch_invariant = batch_invariant};
        for (int i = 0; i < calls; ++i) {
            MoeCudaArgs before = args;
            before.tokens = i % 3 == 1 ? shape_.tokens : tokens;
            before.y = arena.upload(y_.bf16);
            moe_cuda(stream.get(), before);
        }
        if (graph) {
            Graph::capture(stream.get(), [&] { moe_cuda(stream.get(), args); }).launch(stream.get());
        } else {
            moe_cuda(stream.get(), args);
        }
        stream.synchronize();
        return bf16_values(DeviceArena::download(y, tokens * shape_.hidden));
    }

    // Token t's x, or the first weight of output h of expert e, is no number.
    void spoil_token(int64_t t) { x_.bf16[static_cast<size_t>(t * shape_.hidden)] = 0x7FC0; }
    void spoil_weight(int64_t e, int64_t h) {
        const auto at = static_cast<size_t>((e * shape_.hidden + h) * shape_.width);
        if (shape_.fp8) {
            down_.fp8[at] = 0x7F;
        } else {
            down_.bf16[at] = 0x7FC0;
        }
    }
    // Token t's i-th choice is no expert.
    void drop_choice(int64_t t, int64_t i) { chosen_[static_cast<size_t>(t * shape_.k + i)] = -1; }
    void set_routing_weight(int64_t t, float weight) {
        for (int64_t i = 0; i < shape_.k; ++i) {
            weights_[static_cast<size_t>(t * shape_.k + i)] = weight;
        }
    }
    // The outputs of the experts from `first` on times `by`, and y from zero on. fp8.
    void scale_outputs(int64_t first, float by) {
        for (size_t e = static_cast<size_t>(first); e < down_scale_.size(); ++e) {
            down_scale_[e] *= by;
        }
        std::fill(y_.values.begin(), y_.values.end(), 0.0f);
        std::fill(y_.bf16.begin(), y_.bf16.end(), uint16_t{0});
    }
    bool chooses(int64_t t, int32_t e) const {
        const auto first = chosen_.begin() + t * shape_.k;
        return std::find(first, first + shape_.k, e) != first + shape_.k;
    }

  private:
    float input_scale(int64_t e) const {
        return !shape_.fp8 ? 1.0f : e < shape_.experts || shape_.same_input_scale ? 0.011f : 0.017f;
    }

    void choose() {
        std::uniform_real_distribution<float> uniform(0, 1);
        for (int64_t t = 0; t < shape_.tokens; ++t) {
            std::vector<int32_t> ids(static_cast<size_t>(shape_.experts));
            std::iota(ids.begin(), ids.end(), 0);
            std::shuffle(ids.begin() + (shape_.hot ? 1 : 0), ids.end(), random_);
            ids.resize(static_cast<size_t>(shape_.k));
            std::sort(ids.begin(), ids.end());
            for (const int32_t id : ids) {
                const bool none =
                    shape_.nobody || (shape_.padding && t % 3 == 2) || (shape_.late && t < shape_.tokens / 2);
                chosen_.push_back(none ? -1 : id);
                weights_.push_back(uniform(random_));
            }
        }
    }

    template <typename T>
    T quantised(float value, float scale) const {
        return shape_.fp8 ? static_cast<T>(round_to_e4m3(value / scale)) * static_cast<T>(scale)
                          : static_cast<T>(value);
    }
    // Expert e (= experts: the shared one) of token t.
    template <typename T>
    std::vector<T> expert(int64_t t, int32_t e, bool unfused) const {
        const bool shared = e == shape_.experts;
        const int64_t width = shared ? shape_.shared_width : shape_.width;
        const float* gate_up = (shared ? shared_gate_up_.values.data() : gate_up_.values.data()) +
                               (shared ? 0 : e * 2 * width * shape_.hidden);
        const float* down = (shared ? shared_down_.values.data() : down_.values.data()) +
                            (shared ? 0 : e * width * shape_.hidden);
        const auto dot = [](const std::vector<T>& in, const float* row) {
            T sum = 0;
            for (size_t i = 0; i < in.size(); ++i) {
                sum += in[i] * static_cast<T>(row[i]);
            }
            return sum;
        };
        std::vector<T> x;
        for (int64_t h = 0; h < shape_.hidden; ++h) {
            x.push_back(quantised<T>(x_.values[static_cast<size_t>(t * shape_.hidden + h)], input_scale(e)));
        }
        const auto index = static_cast<size_t>(e);
        std::vector<T> act;
        for (int64_t f = 0; f < width; ++f) {
            T gate = dot(x, gate_up + f * shape_.hidden) * static_cast<T>(gate_up_scale_[2 * index]);
            T up =
                dot(x, gate_up + (width + f) * shape_.hidden) * static_cast<T>(gate_up_scale_[2 * index + 1]);
            gate = unfused ? rounded(gate) : gate;
            up = unfused ? rounded(up) : up;
            act.push_back(quantised<T>(to_bf16(static_cast<double>(gate / (1 + std::exp(-gate)) * up)),
                                       down_input_scale_[index]));
        }
        std::vector<T> out;
        for (int64_t h = 0; h < shape_.hidden; ++h) {
            out.push_back(dot(act, down + h * width) * static_cast<T>(down_scale_[index]));
        }
        return out;
    }

    Shape shape_;
    std::mt19937 random_;
    TestValues x_, y_, gate_up_, down_, shared_gate_up_, shared_down_;
    std::vector<float> gate_up_scale_, down_scale_, down_input_scale_, weights_;
    std::vector<int32_t> chosen_;
};

void expect_agreement(const std::vector<Shape>& shapes) {
    for (const Shape& shape : shapes) {
        Case test_case(shape);
        const std::vector<double> want = test_case.reference();
        const double error = relative_error(test_case.run(shape.tokens, false), want);
        std::printf("moe %s: relative error %.2e\n", name_of(shape).c_str(), error);
        EXPECT_LT(error, shape.fp8 ? 6e-3 : 4e-3) << name_of(shape);
    }
}

TEST(MoeCuda, agrees_with_loops_in_double) {
    for (const bool fp8 : {false, true}) {
        const std::vector<Shape> shapes = {{1, 256, 16, 4, 128, 128, fp8},
                                           {7, 256, 16, 4, 128, 128, fp8, false, true},
                                           {8, 1040, 64, 8, 80, 1072, fp8, false},
                                           {8, 144, 8, 2, 80, 48, fp8, true, false, true},
                                           {5, 272, 2, 1, 1040, 0, fp8, true, true},
                                           {3, 512, 0, 0, 0, 1328, fp8},
                                           {8, 256, 4, 2, 128, 128, fp8, true, false, false, true},
                                           // One launch: batches of loads, groups of outputs, slices.
                                           {1, 1024, 64, 8, 80, 1072, fp8, false},
                                           {2, 4352, 2, 1, 48, 16, fp8, true, true},
                                           {1, 2304, 9, 8, 192, 192, fp8, false},
                                           {4, 4096, 2, 2, 16, 528, fp8},
                                           // The first entry is not the first warp's.
                                           {8, 256, 24, 8, 48, 0, fp8, true, false, false, false, true},
                                           // One token of narrow experts: all units and pieces.
                                           {1, 1024, 9, 8, 192, 192, fp8, false},
                                           {1, 4096, 3, 2, 80, 48, fp8},
                                           {1, 4064, 3, 3, 48, 0, fp8},
                                           {1, 1568, 8, 5, 48, 112, fp8, false},
                                           {1, 32, 4, 1, 16, 16, fp8},
                                           {1, 512, 8, 4, 96, 48, fp8, true, false, false, true},
                                           {63, 144, 8, 2, 80, 48, fp8},  // tails along every dimension
                                           {65, 256, 4, 2, 192, 192, fp8, false},  // tile of 64
                                           {129, 272, 2, 1, 144, 0, fp8, true, false, true},
                                           {200, 256, 3, 2, 128, 256, fp8, true, true},  // tile of 128
                                           {33, 512, 0, 0, 0, 336, fp8},                 // dense
                                           {230, 256, 0, 0, 0, 208, fp8},
                                           {270, 144, 2, 1, 528, 80, fp8},  // x sorted
                                           {400, 128, 2, 1, 512, 64, fp8, false, true, true},
                                           {9, 256, 4, 2, 128, 128, fp8, true, false, false, true},
                                           {300, 256, 16, 4, 128, 128, fp8, true, false, true},
                                           // Down tiles of few stages, two at once.
                                           {20, 1024, 16, 4, 128, 64, fp8, false, true},
                                           {90, 1024, 8, 4, 112, 64, fp8, true, false, true},
                                           {130, 1024, 3, 2, 128, 128, fp8},
                                           // Some rows of few experts: three consumers in e4m3.
                                           {40, 256, 16, 8, 640, 64, fp8},
                                           {90, 272, 16, 8, 528, 544, fp8, true, true},
                                           {63, 144, 12, 3, 1040, 0, fp8, true, false, true},
                                           // A thread of the plan has more pairs than it keeps in registers.
                                           {4200, 32, 16, 8, 16, 0, fp8, true, true}};
        expect_agreement(shapes);
    }
}

// By each way through the layer. Few tokens are multiplied with float32 sums, which plain loops have as well.
// The tensor cores' e4m3 sums have 14 bits, so that in tiles more values of act fall the other way; still
// fewer than where gate and up are rounded in between.
TEST(MoeCuda, fp8_is_as_exact_as_straightforward_implementations) {
    for (const Shape& shape : {Shape{1, 256, 16, 8, 192, 192, true}, Shape{1, 384, 8, 4, 320, 64, true},
                               Shape{7, 384, 16, 8, 320, 128, true}, Shape{16, 256, 24, 8, 640, 128, true},
                               Shape{64, 384, 32, 8, 192, 192, true}, Shape{130, 256, 8, 2, 192, 192, true},
                               Shape{130, 256, 3, 2, 320, 128, true}, Shape{400, 128, 8, 4, 192, 192, true},
                               Shape{400, 256, 2, 1, 640, 64, true}}) {
        Case test_case(shape);
        const std::vector<double> want = test_case.reference();
        const double error = relative_error(test_case.run(shape.tokens, false), want);
        const double plain = relative_error(test_case.reference<float>(), want);
        const double unfused = relative_error(test_case.reference<float>(true), want);
        std::printf("moe %s: relative error %.2e, of plain loops %.2e, of an unfused chain %.2e\n",
                    name_of(shape).c_str(), error, plain, unfused);
        EXPECT_LT(error, 1.1 * (shape.tokens <= 8 ? plain : unfused)) << name_of(shape);
    }
}

// Each block makes the plan for itself up to 1,024 pairs and 256 experts; beyond, first tiles are begun
// early.
TEST(MoeCuda, agrees_with_and_without_a_plan_of_each_block) {
    for (const bool fp8 : {false, true}) {
        expect_agreement({{128, 64, 32, 8, 32, 16, fp8, true, true},
                          {129, 64, 32, 8, 32, 16, fp8, true, true},
                          {12, 64, 256, 8, 16, 16, fp8},
                          {12, 64, 257, 8, 16, 16, fp8},
                          {40, 64, 1024, 5, 16, 0, fp8, true, false, true},
                          // Experts without tokens, all tokens to one or three.
                          {150, 576, 48, 1, 144, 80, fp8, false, false, true},
                          {400, 576, 100, 5, 144, 80, fp8, false, true, true},
                          {1100, 64, 40, 1, 48, 0, fp8, true, false, true},
                          {700, 64, 3, 3, 80, 80, fp8, true, true},
                          {300, 64, 20, 5, 16, 0, fp8, true, false, false, true}});
    }
}

// Items of all widths, some of experts without tokens or with nearly all.
TEST(MoeCuda, narrow_experts_of_many_tokens_agree_with_loops_in_double) {
    expect_agreement({{129, 64, 16, 4, 192, 192, true},
                      {255, 192, 12, 8, 192, 0, true, true, true},
                      {257, 128, 40, 1, 192, 192, true, true, false, true},
                      {513, 128, 24, 8, 192, 192, true, false},
                      {600, 64, 8, 8, 192, 192, true},
                      {777, 64, 20, 5, 192, 0, true, true, false, false, true},
                      {777, 64, 20, 5, 192, 192, true, true, false, false, true},
                      {1024, 64, 256, 8, 192, 192, true},
                      {1025, 320, 192, 3, 192, 192, true, false, true, true},
                      {2049, 64, 9, 2, 192, 0, true, true, true},
                      {3500, 64, 16, 2, 192, 192, true},
                      {4096, 64, 32, 2, 192, 192, true},
                      {4097, 64, 4, 1, 192, 192, true}});
}

// By clusters (narrow_fp8.cuh): items of all widths, some an expert or none, and rounds of few clusters.
TEST(MoeCuda, narrow_experts_of_some_tokens_agree_with_loops_in_double) {
    expect_agreement({{7, 256, 40, 8, 192, 192, true},
                      {9, 256, 40, 8, 192, 0, true},
                      {16, 512, 36, 8, 192, 192, true, false},
                      {33, 768, 34, 4, 192, 192, true},
                      {63, 256, 40, 8, 192, 192, true, true, true},
                      {90, 256, 40, 8, 192, 192, true, true, false, false, true},
                      {70, 256, 70, 8, 192, 0, true},
                      {100, 256, 36, 8, 192, 192, true, false, false, true},
                      {110, 256, 40, 8, 192, 192, true, true, true, true},
                      {130, 256, 40, 5, 192, 0, true, true, true, false, false, true},
                      {150, 256, 90, 8, 192, 192, true, false},
                      {600, 256, 40, 2, 192, 0, true, true, true, true},
                      {700, 256, 40, 1, 192, 192, true}});
}

TEST(MoeCuda, a_token_of_narrow_experts_has_the_same_bits_in_any_batch) {
    for (const Shape& shape :
         {Shape{1100, 128, 12, 8, 192, 192, true, false}, Shape{2100, 64, 24, 5, 192, 0, true, true, true},
          Shape{1100, 256, 40, 8, 192, 192, true, false}, Shape{1100, 512, 50, 5, 192, 0, true}}) {
        Case test_case(shape);
        const std::vector<float> all = test_case.run(shape.tokens, false, true);
        for (const int64_t tokens : {1, 63, 65, 127, 128, 129, 140, 300, 513, 1024, 1025}) {
            const std::vector<float> some = test_case.run(tokens, true, true);
            EXPECT_TRUE(std::equal(some.begin(), some.end(), all.begin()))
                << tokens << " of " << name_of(shape);
        }
    }
}

TEST(MoeCuda, a_token_has_the_same_bits_in_any_batch_and_in_a_graph) {
    for (const bool fp8 : {false, true}) {
        // Narrow, middle and wide tiles, and x in the order of the rows or not.
        for (const Shape& shape :
             {Shape{400, 256, 4, 2, 128, 128, fp8}, Shape{400, 128, 2, 1, 512, 64, fp8},
              Shape{300, 256, 12, 8, 192, 128, fp8}, Shape{300, 256, 12, 8, 640, 128, fp8}}) {
            Case test_case(shape);
            const std::vector<float> all = test_case.run(shape.tokens, false, true);
            for (const int64_t tokens : {1, 17, 20, 50, 140, 300}) {
                const std::vector<float> some = test_case.run(tokens, true, true);
                EXPECT_TRUE(std::equal(some.begin(), some.end(), all.begin()))
                    << tokens << " of " << name_of(shape);
            }
        }
    }
}

TEST(MoeCuda, what_is_no_number_shows_there_and_nowhere_else) {
    for (const bool fp8 : {false, true}) {
        // Without a list; narrow, middle and wide tiles; tokens without experts.
        for (const Shape& shape :
             {Shape{8, 256, 16, 8, 128, 64, fp8}, Shape{30, 256, 32, 8, 144, 64, fp8},
              Shape{70, 256, 16, 8, 192, 0, fp8}, Shape{400, 128, 9, 8, 528, 64, fp8},
              Shape{90, 144, 6, 3, 128, 64, fp8, true, true}, Shape{400, 128, 9, 8, 192, 192, fp8},
              Shape{30, 256, 12, 8, 528, 0, fp8}}) {
            Case plain(shape);
            Case spoiled(shape);
            spoiled.spoil_token(4);
            spoiled.spoil_weight(5, 33);
            spoiled.set_routing_weight(7, NAN);
            const std::vector<float> want = plain.run(shape.tokens, false);
            const std::vector<float> got = spoiled.run(shape.tokens, false);
            int64_t wrong = 0;
            for (int64_t t = 0; t < shape.tokens; ++t) {
                for (int64_t h = 0; h < shape.hidden; ++h) {
                    const auto at = static_cast<size_t>(t * shape.hidden + h);
                    const bool none = t == 4 || t == 7 || (h == 33 && plain.chooses(t, 5));
                    wrong += none ? !std::isnan(got[at]) : got[at] != want[at];
                }
            }
            EXPECT_EQ(wrong, 0) << name_of(shape);
        }
    }
}

TEST(MoeCuda, one_token_with_choices_that_are_no_experts) {
    for (const bool fp8 : {false, true}) {
        for (const int64_t shared_width : {0, 64}) {
            Case test_case({1, 1024, 24, 8, 112, shared_width, fp8, false});
            for (const int64_t i : {3, 0, 7, 4}) {
                test_case.drop_choice(0, i);
                EXPECT_LT(relative_error(test_case.run(1, false), test_case.reference()), fp8 ? 6e-3 : 4e-3)
                    << "without choice " << i;
            }
        }
    }
}

TEST(MoeCuda, what_is_no_number_shows_with_one_token) {
    for (const bool fp8 : {false, true}) {
        const Shape shape{1, 512, 8, 8, 144, 64, fp8};
        Case plain(shape);
        Case spoiled(shape);
        spoiled.spoil_weight(5, 33);
        const std::vector<float> want = plain.run(1, false);
        const std::vector<float> got = spoiled.run(1, false);
        for (size_t h = 0; h < got.size(); ++h) {
            EXPECT_TRUE(h == 33 ? std::isnan(got[h]) : got[h] == want[h]) << h;
        }
        spoiled.spoil_token(0);
        for (const float value : spoiled.run(1, false)) {
            EXPECT_TRUE(std::isnan(value));
        }
    }
}

TEST(MoeCuda, outputs_of_any_size_are_as_exact) {
    for (const int64_t tokens : {8, 20, 70, 400}) {
        for (const float by : {1e-24f, 1.0f, 1e24f}) {
            // Of all experts, or of one that most tokens do not choose.
            for (const int64_t first : {0, 8}) {
                Case test_case({tokens, 256, 9, 1, 128, 0, true});
                test_case.scale_outputs(first, by);
                test_case.set_routing_weight(3, 1e-6f);
                test_case.set_routing_weight(5, 1e6f);
                test_case.set_routing_weight(6, 0);
                const std::vector<double> want = test_case.reference();
                const std::vector<float> got = test_case.run(tokens, false);
                double worst = 0;  // of a token: values of act may round the other way
                for (size_t at = 0; at < got.size(); at += 256) {
                    worst = std::max(worst, relative_error(std::span(got).subspan(at, 256),
                                                           std::span(want).subspan(at, 256)));
                }
                EXPECT_LT(worst, 5e-2) << tokens << " tokens, from expert " << first << " on times " << by;
            }
        }
    }
}

TEST(MoeCuda, few_tokens_have_the_same_bits_after_any_calls) {
    for (const bool fp8 : {false, true}) {
        // Among calls of all 20 tokens; of all 8, with which one token shares an exchange.
        for (const int64_t all : {20, 8}) {
            const int64_t shared_width = all == 20 ? 320 : 192;
            Case test_case({all, 512, 16, 4, 192, shared_width, fp8, false, true});
            for (const int64_t tokens : {1, 2, 8}) {
                const std::vector<float> first = test_case.run(tokens, false);
                for (const int calls : {1, 2, 7}) {
                    EXPECT_TRUE(test_case.run(tokens, true, false, calls) == first)
                        << tokens << " of " << all << ", " << calls;
                }
            }
        }
    }
}

TEST(MoeCuda, more_tokens_have_the_same_bits_after_any_calls) {
    for (const bool fp8 : {false, true}) {
        for (const int64_t shared : {64, 192}) {
            Case test_case({600, 128, 24, 4, 192, shared, fp8, false, true});
            for (const int64_t tokens : {20, 180, 590}) {
                const std::vector<float> first = test_case.run(tokens, false);
                for (const int calls : {1, 2, 7}) {
                    EXPECT_TRUE(test_case.run(tokens, true, false, calls) == first)
                        << tokens << ", " << calls;
                }
            }
        }
    }
}

TEST(MoeCuda, a_batch_of_few_tokens_is_as_exact_as_one_of_many) {
    for (const bool fp8 : {false, true}) {
        Case test_case({8, 512, 16, 4, 192, 192, fp8, false});
        const std::vector<double> want = test_case.reference();
        const double few = relative_error(test_case.run(8, true), want);
        const double many = relative_error(test_case.run(8, false, true), want);
        EXPECT_LT(few, 1.1 * many) << (fp8 ? "fp8" : "bf16");
    }
}

}  // namespace
}  // namespace tessera

// Routed experts with grouped weights, packed as the engine packs them, beside a bfloat16 shared expert.
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
#include "ops/moe/cuda/moe_cuda.h"
#include "ops/moe/cuda/moe_routed_case.h"
#include "ops/moe/w4_layout.h"
#include "ops/moe/w8_layout.h"

namespace tessera {
namespace {

struct Shape {
    int64_t tokens, hidden, experts, k, width, shared_width;
};

// [rows, inputs] of random codes, and scales of their groups.
struct Int4Matrix {
    static constexpr const char* kName = "int4";
    static constexpr DType kDType = DType::kInt4;
    static int64_t unit_bytes(int64_t inputs_count) { return w4_unit_bytes(inputs_count); }
    // Rows from `first` on of down, or with `up` of gate and up, as a unit.
    void pack(const Int4Matrix* up, int64_t first, uint8_t* to) const {
        w4_pack_unit({.weight = source(),
                      .up = up != nullptr ? up->source() : W4Source{},
                      .first = first,
                      .inputs = inputs,
                      .to = to});
    }

    Int4Matrix(std::mt19937& random, int64_t rows_count, int64_t inputs_count)
        : rows(rows_count), inputs(inputs_count), groups((inputs + 127) / 128) {
        std::uniform_int_distribution<int> code(-8, 7);
        std::uniform_real_distribution<float> spread(0.5f, 1.5f);
        for (int64_t i = 0; i < rows * inputs; ++i) {
            values.push_back(code(random));
        }
        for (int64_t i = 0; i < rows * inputs; i += 2) {
            const int low = values[static_cast<size_t>(i)] & 15;
            const int high = values[static_cast<size_t>(i + 1)] & 15;
            codes.push_back(static_cast<uint8_t>(low | high << 4));
        }
        for (int64_t i = 0; i < rows * groups; ++i) {
            scales.push_back(f32_to_bf16(0.2f / std::sqrt(static_cast<float>(inputs)) * spread(random)));
        }
    }
    // Sums of T: double, or float as a plain program has them.
    template <typename T>
    T dot(int64_t row, const std::vector<T>& x) const {
        T sum = 0;
        for (int64_t k = 0; k < inputs; ++k) {
            const T weight = static_cast<T>(values[static_cast<size_t>(row * inputs + k)]) *
                             static_cast<T>(bf16_to_f32(scales[static_cast<size_t>(row * groups + k / 128)]));
            sum += x[static_cast<size_t>(k)] * weight;
        }
        return sum;
    }
    W4Source source() const { return {codes.data(), scales.data()}; }

    int64_t rows, inputs, groups;
    std::vector<int> values;
    std::vector<uint8_t> codes;
    std::vector<uint16_t> scales;
};

// The same of e4m3, with a scale for each block of 128 x 128.
struct Fp8Matrix {
    static constexpr const char* kName = "fp8";
    static constexpr DType kDType = DType::kFloat8E4M3;
    static int64_t unit_bytes(int64_t inputs_count) { return w8_unit_bytes(inputs_count); }
    void pack(const Fp8Matrix* up, int64_t first, uint8_t* to) const {
        w8_pack_unit({.weight = source(),
                      .up = up != nullptr ? up->source() : W8Source{},
                      .first = first,
                      .inputs = inputs,
                      .to = to});
    }

    Fp8Matrix(std::mt19937& random, int64_t rows, int64_t inputs_count)
        : inputs(inputs_count), groups((inputs + 127) / 128) {
        std::uniform_real_distribution<float> spread(0.5f, 1.5f);
        codes = random_values(random, rows * inputs, 8, true).fp8;
        for (int64_t i = 0; i < (rows + 127) / 128 * groups; ++i) {
            scales.push_back(spread(random) / (8 * std::sqrt(static_cast<float>(inputs))));
        }
    }
    template <typename T>
    T dot(int64_t row, const std::vector<T>& x) const {
        T sum = 0;
        for (int64_t k = 0; k < inputs; ++k) {
            const float code = e4m3_to_f32(codes[static_cast<size_t>(row * inputs + k)]);
            const float scale = scales[static_cast<size_t>(row / 128 * groups + k / 128)];
            sum += x[static_cast<size_t>(k)] * (static_cast<T>(code) * static_cast<T>(scale));
        }
        return sum;
    }
    W8Source source() const { return {codes.data(), scales.data()}; }

    int64_t inputs, groups;
    std::vector<uint8_t> codes;
    std::vector<float> scales;
};

// Matrix: Int4Matrix or Fp8Matrix.
template <typename Matrix>
class Case {
  public:
    explicit Case(const Shape& shape)
        : s_(shape), random_(static_cast<uint32_t>(shape.tokens + shape.width)) {
        x_ = random_values(random_, s_.tokens * s_.hidden, 1, false);
        y_ = random_values(random_, s_.tokens * s_.hidden, 1, false);
        const float deviation = 1.0f / std::sqrt(static_cast<float>(s_.hidden));
        shared_gate_up_ = random_values(random_, 2 * s_.shared_width * s_.hidden, deviation, false);
        shared_down_ = random_values(random_, s_.hidden * s_.shared_width, deviation, false);
        gate_up_units_.resize(static_cast<size_t>(s_.experts * gate_up_bytes()));
        down_units_.resize(static_cast<size_t>(s_.experts * down_bytes()));
        for (int64_t e = 0; e < s_.experts; ++e) {
            gate_.emplace_back(random_, s_.width, s_.hidden);
            up_.emplace_back(random_, s_.width, s_.hidden);
            down_.emplace_back(random_, s_.hidden, s_.width);
            pack(e);
        }
        std::uniform_real_distribution<float> uniform(0, 1);
        for (int64_t t = 0; t < s_.tokens; ++t) {
            std::vector<int32_t> ids(static_cast<size_t>(s_.experts));
            std::iota(ids.begin(), ids.end(), 0);
            std::shuffle(ids.begin(), ids.end(), random_);
            ids.resize(static_cast<size_t>(s_.k));
            std::sort(ids.begin(), ids.end());
            for (const int32_t id : ids) {
                chosen_.push_back(t % 5 == 4 ? -1 : id);
                weights_.push_back(uniform(random_));
            }
        }
    }

    // T = double: the layer with its inputs' roundings. T = float: the straightforward implementation;
    // unfused: with gate and up rounded to bfloat16, as a chain of products has them.
    template <typename T>
    std::vector<T> reference(bool unfused = false) const {
        std::vector<T> want;
        for (int64_t t = 0; t < s_.tokens; ++t) {
            std::vector<T> sum(static_cast<size_t>(s_.hidden));
            const auto begin = x_.values.begin() + t * s_.hidden;
            const std::vector<float> x(begin, begin + s_.hidden);
            for (int64_t i = 0; i < s_.k; ++i) {
                const auto at = static_cast<size_t>(t * s_.k + i);
                if (chosen_[at] >= 0) {
                    add_expert(chosen_[at], quantised_row<T>(x), static_cast<T>(weights_[at]), unfused, sum);
                }
            }
            const std::vector<T> shared = shared_out<T>({x.begin(), x.end()});
            for (int64_t h = 0; h < s_.hidden; ++h) {
                const auto at = static_cast<size_t>(h);
                const T both = rounded(rounded(sum[at]) + rounded(shared[at]));
                want.push_back(rounded(y_.values[static_cast<size_t>(t * s_.hidden + h)] + both));
            }
        }
        return want;
    }

    // calls: so many before, in the same workspace, every third of all tokens.
    std::vector<float> run(int64_t tokens, bool graph, bool batch_invariant = false, int calls = 0) const {
        DeviceArena arena;
        Stream stream;
        const MoeCudaWeights weights = moe_cuda_bind({.dtype = Matrix::kDType,
                                                      .fp8_blocks = Matrix::kDType == DType::kFloat8E4M3,
                                                      .hidden = s_.hidden,
                                                      .experts = s_.experts,
                                                      .width = s_.width,
                                                      .shared_width = s_.shared_width,
                                                      .gate_up = arena.upload(gate_up_units_),
                                                      .down = arena.upload(down_units_),
                                                      .shared_gate_up = arena.upload(shared_gate_up_.bf16),
                                                      .shared_down = arena.upload(shared_down_.bf16)});
        uint16_t* y = arena.upload(y_.bf16);
        const MoeCudaArgs args{.weights = &weights,
                               .x = arena.upload(x_.bf16),
                               .tokens = tokens,
                               .k = s_.k,
                               .chosen = arena.upload(chosen_),
                               .expert_weights = arena.upload(weights_),
                               .y = y,
                               .workspace = arena.poisoned<std::byte>(
                                   moe_cuda_workspace_bytes(weights.tensors, s_.tokens, s_.k)),
                               .sm_count = device_sm_count(),
                               .batch_invariant = batch_invariant};
        cuda_check(cudaDeviceSynchronize());
        for (int i = 0; i < calls; ++i) {
            MoeCudaArgs before = args;
            before.tokens = i % 3 == 1 ? s_.tokens : tokens;
            before.y = arena.upload(y_.bf16);
            moe_cuda(stream.get(), before);
        }
        if (graph) {
            Graph::capture(stream.get(), [&] { moe_cuda(stream.get(), args); }).launch(stream.get());
        } else {
            moe_cuda(stream.get(), args);
        }
        stream.synchronize();
        return bf16_values(DeviceArena::download(y, tokens * s_.hidden));
    }

  private:
    // Of an expert.
    int64_t gate_up_bytes() const { return s_.width / 32 * Matrix::unit_bytes(s_.hidden); }
    int64_t down_bytes() const { return s_.hidden / 64 * Matrix::unit_bytes(s_.width); }
    void pack(int64_t e) {
        const auto at = static_cast<size_t>(e);
        uint8_t* to = gate_up_units_.data() + e * gate_up_bytes();
        for (int64_t first = 0; first < s_.width; first += 32, to += Matrix::unit_bytes(s_.hidden)) {
            gate_[at].pack(&up_[at], first, to);
        }
        to = down_units_.data() + e * down_bytes();
        for (int64_t first = 0; first < s_.hidden; first += 64, to += Matrix::unit_bytes(s_.width)) {
            down_[at].pack(nullptr, first, to);
        }
    }
    template <typename T>
    void add_expert(int32_t e, const std::vector<T>& x, T share, bool unfused, std::vector<T>& sum) const {
        const auto at = static_cast<size_t>(e);
        std::vector<float> act;
        for (int64_t f = 0; f < s_.width; ++f) {
            const T exact_gate = gate_[at].dot(f, x);
            const T exact_up = up_[at].dot(f, x);
            const T gate = unfused ? rounded(exact_gate) : exact_gate;
            const T up = unfused ? rounded(exact_up) : exact_up;
            act.push_back(to_bf16(static_cast<double>(gate / (1 + std::exp(-gate)) * up)));
        }
        const std::vector<T> act8 = quantised_row<T>(act);
        for (int64_t h = 0; h < s_.hidden; ++h) {
            sum[static_cast<size_t>(h)] += share * rounded(down_[at].dot(h, act8));
        }
    }
    template <typename T>
    std::vector<T> shared_out(const std::vector<T>& x) const {
        const auto dot = [](const TestValues& weight, int64_t row, const std::vector<T>& in) {
            T sum = 0;
            for (size_t i = 0; i < in.size(); ++i) {
                sum += in[i] * static_cast<T>(weight.values[static_cast<size_t>(row) * in.size() + i]);
            }
            return sum;
        };
        std::vector<T> act;
        for (int64_t f = 0; f < s_.shared_width; ++f) {
            const T gate = dot(shared_gate_up_, f, x);
            const T up = dot(shared_gate_up_, s_.shared_width + f, x);
            act.push_back(static_cast<T>(to_bf16(static_cast<double>(gate / (1 + std::exp(-gate)) * up))));
        }
        std::vector<T> out(static_cast<size_t>(s_.hidden));
        for (int64_t h = 0; s_.shared_width > 0 && h < s_.hidden; ++h) {
            out[static_cast<size_t>(h)] = dot(shared_down_, h, act);
        }
        return out;
    }

    Shape s_;
    std::mt19937 random_;
    TestValues x_, y_, shared_gate_up_, shared_down_;
    std::vector<Matrix> gate_, up_, down_;
    std::vector<uint8_t> gate_up_units_, down_units_;
    std::vector<int32_t> chosen_;
    std::vector<float> weights_;
};

// The tensor cores' e4m3 sums have 14 bits, so that more values of act fall the other way than with float32
// sums. int4 codes have few bits themselves; of e4m3 weights it is fewer than where gate and up are rounded
// in between.
template <typename Matrix>
void expect_agreement(const std::vector<Shape>& shapes) {
    for (const Shape& shape : shapes) {
        const Case<Matrix> test_case(shape);
        const std::vector<double> want = test_case.template reference<double>();
        const double error = relative_error(test_case.run(shape.tokens, false), want);
        const double plain = relative_error(test_case.template reference<float>(), want);
        const double unfused = relative_error(test_case.template reference<float>(true), want);
        std::printf("moe %s T%d H%d E%d F%d+%d: relative error %.2e, of plain loops %.2e, unfused %.2e\n",
                    Matrix::kName, static_cast<int>(shape.tokens), static_cast<int>(shape.hidden),
                    static_cast<int>(shape.experts), static_cast<int>(shape.width),
                    static_cast<int>(shape.shared_width), error, plain, unfused);
        EXPECT_LT(error, 1.1 * (Matrix::kDType == DType::kInt4 ? plain : unfused));
        EXPECT_LT(error, 1e-2);
    }
}

TEST(MoeW4Cuda, agrees_with_loops_in_double) {
    expect_agreement<Int4Matrix>(
        {Shape{1, 256, 8, 4, 128, 128}, Shape{1, 2048, 4, 1, 64, 0}, Shape{1, 512, 12, 8, 192, 64},
         Shape{1, 4096, 4, 2, 192, 0}, Shape{1, 384, 8, 5, 192, 0}, Shape{7, 384, 4, 2, 192, 0},
         Shape{8, 128, 16, 8, 320, 64}, Shape{16, 384, 4, 2, 192, 0}, Shape{24, 256, 8, 2, 192, 64},
         Shape{100, 128, 4, 2, 64, 64}, Shape{130, 256, 2, 1, 320, 0}, Shape{100, 256, 12, 3, 192, 64},
         Shape{130, 384, 2, 1, 192, 0}, Shape{640, 128, 40, 2, 192, 32}});
}

TEST(MoeW8Cuda, agrees_with_loops_in_double) {
    expect_agreement<Fp8Matrix>({{1, 256, 8, 4, 128, 128},
                                 {7, 384, 4, 2, 192, 0},
                                 {24, 256, 8, 2, 192, 64},
                                 {100, 128, 4, 2, 64, 64},
                                 {130, 256, 2, 1, 320, 0},
                                 {640, 128, 4, 2, 192, 32}});
}

// Batches of several sizes take tiles of several kinds.
template <typename Matrix>
void expect_the_same_bits(int64_t width) {
    const Case<Matrix> test_case({400, 256, 4, 2, width, 128});
    const std::vector<float> all = test_case.run(400, false, true);
    for (const int64_t tokens : {1, 17, 20, 50, 140, 300}) {
        const std::vector<float> some = test_case.run(tokens, true, true);
        EXPECT_TRUE(std::equal(some.begin(), some.end(), all.begin())) << tokens;
    }
}

TEST(MoeW4Cuda, few_tokens_have_the_same_bits_after_any_calls) {
    for (const Shape& shape : {Shape{20, 512, 16, 4, 128, 64}, Shape{20, 512, 16, 4, 192, 64},
                               Shape{20, 512, 4, 2, 192, 64}, Shape{9, 4096, 8, 8, 192, 0}}) {
        const Case<Int4Matrix> test_case(shape);
        for (const int64_t tokens : {1, 2, 8, 16}) {
            if (tokens > shape.tokens) {
                continue;
            }
            const std::vector<float> first = test_case.run(tokens, false);
            for (const int calls : {1, 2, 7}) {
                EXPECT_TRUE(test_case.run(tokens, true, false, calls) == first)
                    << shape.experts << " x " << shape.width << ", " << tokens << ", " << calls;
            }
        }
    }
}

TEST(MoeW4Cuda, a_token_has_the_same_bits_in_any_batch_and_in_a_graph) {
    expect_the_same_bits<Int4Matrix>(128);
}

// Up to 96 tokens by clusters of two blocks, then by the list of tiles.
TEST(MoeW4Cuda, with_narrow_experts_too_a_token_has_the_same_bits_in_any_batch) {
    expect_the_same_bits<Int4Matrix>(192);
}

TEST(MoeW4Cuda, with_wider_experts_too_a_token_has_the_same_bits_in_any_batch) {
    expect_the_same_bits<Int4Matrix>(576);
}

TEST(MoeW8Cuda, a_token_has_the_same_bits_in_any_batch_and_in_a_graph) {
    expect_the_same_bits<Fp8Matrix>(128);
    expect_the_same_bits<Fp8Matrix>(576);
}

// Over many inputs the tensor cores' 14 bits move a value of act across a rounding more often than exact
// sums.
TEST(MoeW4Cuda, a_batch_of_few_tokens_is_as_exact_as_one_of_many) {
    for (const Shape& shape :
         {Shape{1, 1152, 16, 8, 192, 0}, Shape{2, 1152, 16, 8, 192, 0}, Shape{8, 2048, 16, 4, 192, 64},
          Shape{5, 640, 12, 3, 192, 0}, Shape{13, 256, 40, 8, 192, 64}, Shape{2, 1152, 16, 8, 128, 0}}) {
        const Case<Int4Matrix> test_case(shape);
        const std::vector<double> want = test_case.reference<double>();
        const double few = relative_error(test_case.run(shape.tokens, false), want);
        const double many = relative_error(test_case.run(shape.tokens, false, true), want);
        std::printf("moe int4 T%d H%d: relative error %.2e, with a list %.2e\n",
                    static_cast<int>(shape.tokens), static_cast<int>(shape.hidden), few, many);
        EXPECT_LT(few, 1.1 * many);
    }
}

}  // namespace
}  // namespace tessera

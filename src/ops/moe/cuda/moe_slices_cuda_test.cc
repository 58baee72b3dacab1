// A layer whose experts are cut among ranks: each rank has all tokens and the layer's ids less its first
// expert's, of which those of other ranks count for nothing.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <gtest/gtest.h>
#include <iterator>
#include <limits>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "device/cuda/stream.h"
#include "ops/common/cuda/device_testing.h"
#include "ops/moe/cuda/moe_cuda.h"
#include "ops/moe/w4_layout.h"
#include "ops/moe/w8_layout.h"

namespace tessera {
namespace {

struct Shape {
    int64_t tokens, hidden, experts, k, width, shared_width, ranks;
};

// blocks: e4m3 with scales of 128 x 128.
struct Kind {
    DType dtype = DType::kBFloat16;
    bool blocks = false;

    bool grouped() const { return dtype == DType::kInt4 || blocks; }
    // What lies beside grouped experts is bfloat16.
    DType shared() const { return grouped() ? DType::kBFloat16 : dtype; }
    int64_t group_bytes() const { return blocks ? kW8GroupBytes : kW4GroupBytes; }
    int64_t unit_bytes(int64_t inputs) const {
        return blocks ? w8_unit_bytes(inputs) : w4_unit_bytes(inputs);
    }
    // Of rows of weights.
    int64_t bytes(int64_t rows, int64_t inputs) const {
        return grouped() ? rows / kGroupedUnitRows * unit_bytes(inputs) : rows * inputs * dtype_size(dtype);
    }
};
constexpr Kind kInt4{DType::kInt4};
constexpr Kind kBlocks{DType::kFloat8E4M3, true};

std::string name_of(const Kind& kind, const Shape& s) {
    return std::string(dtype_name(kind.dtype)) + (kind.blocks ? " blocks T" : " T") +
           std::to_string(s.tokens) + " H" + std::to_string(s.hidden) + " E" + std::to_string(s.experts) +
           "/" + std::to_string(s.ranks) + " k" + std::to_string(s.k) + " F" + std::to_string(s.width) + "+" +
           std::to_string(s.shared_width);
}

// Random weights of one layer on the device, of which a rank has a part.
class Layer {
  public:
    Layer(const Kind& kind, const Shape& shape)
        : kind_(kind), s_(shape), random_(static_cast<uint32_t>(shape.tokens + 3 * shape.width)) {
        x_ = arena_.upload(random_values(random_, s_.tokens * s_.hidden, 1, false).bf16);
        gate_up_ = arena_.upload(weights(2 * s_.experts * s_.width, s_.hidden));
        down_ = arena_.upload(weights(s_.experts * s_.hidden, s_.width));
        shared_gate_up_ = arena_.upload(matrix(kind.shared(), 2 * s_.shared_width, s_.hidden));
        shared_down_ = arena_.upload(matrix(kind.shared(), s_.hidden, s_.shared_width));
        // The shared expert's are the last.
        gate_up_scale_ = arena_.upload(floats(2 * s_.experts + 2, 1.7f / root(s_.hidden)));
        down_scale_ = arena_.upload(floats(s_.experts + 1, 1.7f / root(std::max(s_.width, s_.shared_width))));
        down_input_scale_ = arena_.upload(floats(s_.experts + 1, 0.02f));
        shares_ = arena_.upload(floats(s_.tokens * s_.k, 1));
        choose();
    }

    MoeCudaTensors rank(int64_t first, int64_t experts, bool shared) const {
        return {.dtype = kind_.dtype,
                .fp8_blocks = kind_.blocks,
                .hidden = s_.hidden,
                .experts = experts,
                .width = s_.width,
                .shared_width = shared ? s_.shared_width : 0,
                .gate_up = gate_up_ + kind_.bytes(first * 2 * s_.width, s_.hidden),
                .down = down_ + kind_.bytes(first * s_.hidden, s_.width),
                .shared_gate_up = shared_gate_up_,
                .shared_down = shared_down_,
                .gate_up_scale = gate_up_scale_ + 2 * first,
                .down_scale = down_scale_ + first,
                .down_input_scale = down_input_scale_ + first,
                .shared_gate_up_scale = gate_up_scale_ + 2 * s_.experts,
                .shared_down_scale = down_scale_ + s_.experts,
                .shared_down_input_scale = down_input_scale_ + s_.experts,
                .input_scale = 0.011f,
                .shared_input_scale = 0.011f};
    }
    // The shared expert as a layer of its own.
    MoeCudaTensors shared_alone() const {
        MoeCudaTensors tensors = rank(0, 0, true);
        tensors.dtype = kind_.shared();
        tensors.fp8_blocks = false;
        tensors.width = 0;
        return tensors;
    }

    const std::vector<int32_t>& chosen() const { return chosen_; }
    // As the rank with experts [first, first + count) sees them. Other experts' ids are what they are, or,
    // since any other id is skipped, far away, also by multiples of what 16 bits hold.
    std::vector<int32_t> chosen_by(int64_t first, int64_t count) const {
        constexpr int32_t kFar = 1 << 16;
        std::vector<int32_t> ids;
        for (size_t i = 0; i < chosen_.size(); ++i) {
            const auto id = static_cast<int32_t>(chosen_[i] - first);
            const auto inside = static_cast<int32_t>(i % static_cast<size_t>(count));
            const int32_t others[] = {id,
                                      std::numeric_limits<int32_t>::min(),
                                      id,
                                      std::numeric_limits<int32_t>::max(),
                                      kFar + inside,
                                      inside - kFar,
                                      static_cast<int32_t>(count)};
            ids.push_back(id >= 0 && id < count && chosen_[i] >= 0 ? id : others[i % std::size(others)]);
        }
        return ids;
    }

    // y after the call.
    std::vector<float> run(const MoeCudaTensors& tensors, const std::vector<int32_t>& chosen,
                           const std::vector<uint16_t>& y, bool batch_invariant) const {
        DeviceArena arena;
        const Stream stream;
        const MoeCudaWeights weights = moe_cuda_bind(tensors);
        const int64_t k = tensors.experts > 0 ? s_.k : 0;
        uint16_t* out = arena.upload(y);
        moe_cuda(stream.get(),
                 {.weights = &weights,
                  .x = x_,
                  .tokens = s_.tokens,
                  .k = k,
                  .chosen = arena.upload(chosen),
                  .expert_weights = shares_,
                  .y = out,
                  .workspace = arena.poisoned<std::byte>(moe_cuda_workspace_bytes(tensors, s_.tokens, k)),
                  .sm_count = device_sm_count(),
                  .batch_invariant = batch_invariant});
        stream.synchronize();
        return bf16_values(DeviceArena::download(out, static_cast<int64_t>(y.size())));
    }

  private:
    static float root(int64_t count) { return std::sqrt(static_cast<float>(count)); }
    // From half of `about` to one and a half.
    std::vector<float> floats(int64_t count, float about) {
        std::uniform_real_distribution<float> spread(0.5f, 1.5f);
        std::vector<float> values;
        for (int64_t i = 0; i < count; ++i) {
            values.push_back(about * spread(random_));
        }
        return values;
    }
    // With sums of about 1; in e4m3 (0.25 to 0.94 of either sign) once they are scaled.
    std::vector<uint8_t> matrix(DType dtype, int64_t rows, int64_t inputs) {
        std::vector<uint8_t> bytes;
        std::uniform_real_distribution<float> uniform(-1.7f, 1.7f);
        for (int64_t i = 0; i < rows * inputs; ++i) {
            if (dtype == DType::kFloat8E4M3) {
                const auto bits = static_cast<uint32_t>(random_());
                bytes.push_back(static_cast<uint8_t>(0x28 + (bits & 15) + ((bits & 16) << 3)));
            } else {
                const uint16_t bits = f32_to_bf16(uniform(random_) / root(inputs));
                bytes.push_back(static_cast<uint8_t>(bits));
                bytes.push_back(static_cast<uint8_t>(bits >> 8));
            }
        }
        return bytes;
    }
    std::vector<uint8_t> weights(int64_t rows, int64_t inputs) {
        return kind_.grouped() ? units(rows / kGroupedUnitRows, inputs) : matrix(kind_.dtype, rows, inputs);
    }
    // Of codes, any nibble is one.
    std::vector<uint8_t> units(int64_t count, int64_t inputs) {
        const int64_t bytes = count * kind_.unit_bytes(inputs);
        std::vector<uint8_t> out;
        if (kind_.blocks) {
            out = matrix(DType::kFloat8E4M3, bytes, 1);
        } else {
            std::generate_n(std::back_inserter(out), bytes,
                            [this] { return static_cast<uint8_t>(random_()); });
        }
        const float about = (kind_.blocks ? 1.7f : 0.22f) / root(inputs);
        for (int64_t unit = 0; unit < count; ++unit) {
            for (int64_t group = 0; group * kGroupedInputs < inputs; ++group) {
                uint8_t* to = out.data() + unit * kind_.unit_bytes(inputs) + group * kind_.group_bytes();
                if (kind_.blocks) {
                    std::memcpy(to, floats(kW8ScaleBytes / 4, about).data(), kW8ScaleBytes);
                } else {
                    for (const float scale : floats(kW4ScaleBytes / 2, about)) {
                        const uint16_t bits = f32_to_bf16(scale);
                        std::memcpy(to, &bits, sizeof(bits));
                        to += sizeof(bits);
                    }
                }
            }
        }
        return out;
    }
    // Every seventh token is padding.
    void choose() {
        std::vector<int32_t> ids(static_cast<size_t>(s_.experts));
        std::iota(ids.begin(), ids.end(), 0);
        for (int64_t t = 0; t < s_.tokens; ++t) {
            std::shuffle(ids.begin(), ids.end(), random_);
            std::vector<int32_t> some(ids.begin(), ids.begin() + s_.k);
            std::sort(some.begin(), some.end());
            if (t % 7 == 6) {
                std::fill(some.begin(), some.end(), -1);
            }
            chosen_.insert(chosen_.end(), some.begin(), some.end());
        }
    }

    Kind kind_;
    Shape s_;
    std::mt19937 random_;
    DeviceArena arena_;
    const uint16_t* x_ = nullptr;
    const uint8_t *gate_up_ = nullptr, *down_ = nullptr, *shared_gate_up_ = nullptr, *shared_down_ = nullptr;
    const float *gate_up_scale_ = nullptr, *down_scale_ = nullptr, *down_input_scale_ = nullptr,
                *shares_ = nullptr;
    std::vector<int32_t> chosen_;
};

// The shared expert is the first rank's.
void expect_sum_of_ranks(const Kind& kind, const Shape& s) {
    const Layer layer(kind, s);
    const auto count = static_cast<size_t>(s.tokens * s.hidden);
    const auto hidden = static_cast<size_t>(s.hidden);
    const std::vector<uint16_t> zeros(count);
    for (const bool invariant : {false, true}) {
        const std::vector<float> whole =
            layer.run(layer.rank(0, s.experts, true), layer.chosen(), zeros, invariant);
        std::vector<double> sum(count);
        const int64_t experts = s.experts / s.ranks;
        for (int64_t first = 0; first < s.experts; first += experts) {
            const std::vector<float> part = layer.run(layer.rank(first, experts, first == 0),
                                                      layer.chosen_by(first, experts), zeros, invariant);
            std::transform(part.begin(), part.end(), sum.begin(), sum.begin(),
                           [](float a, double b) { return static_cast<double>(a) + b; });
        }
        double worst = 0;  // of a token
        for (size_t at = 0; at < count; at += hidden) {
            worst = std::max(worst, relative_error(std::span(whole).subspan(at, hidden),
                                                   std::span(sum).subspan(at, hidden)));
        }
        const double all = relative_error(whole, sum);
        const std::string name = name_of(kind, s) + (invariant ? " batch_invariant" : "");
        std::printf("moe %s: ranks' sum and whole %.2e apart, a token at most %.2e\n", name.c_str(), all,
                    worst);
        // A pair that is missing, or there twice, is a quarter of its token.
        const bool narrow = kind.dtype != DType::kBFloat16;
        EXPECT_LT(all, narrow ? 1e-2 : 5e-3) << name;
        EXPECT_LT(worst, narrow ? 1e-1 : 1.5e-2) << name;
    }
}

TEST(MoeSlicesCuda, ranks_add_up_to_the_layer) {
    for (const DType dtype : {DType::kBFloat16, DType::kFloat8E4M3}) {
        for (const Shape& shape :
             {Shape{1, 256, 96, 8, 192, 192, 4},     // of narrow fp8 experts without a list, one token
              Shape{1, 256, 48, 8, 384, 0, 2},       // few tokens
              Shape{8, 256, 48, 8, 384, 192, 2},     //
              Shape{8, 128, 96, 8, 768, 0, 2},       //
              Shape{24, 256, 192, 8, 128, 64, 2},    // a plan of each block
              Shape{60, 256, 96, 8, 192, 192, 2},    // narrow fp8 experts by clusters
              Shape{200, 256, 192, 8, 192, 0, 4},    //
              Shape{120, 128, 96, 8, 384, 128, 2},   //
              Shape{12, 64, 514, 8, 48, 48, 2},      // plan_kernel, and with early tiles
              Shape{300, 128, 48, 4, 192, 64, 2},    //
              Shape{600, 64, 16, 8, 768, 0, 4},      // by a cluster; experts of several tiles
              Shape{4200, 32, 16, 8, 48, 48, 2}}) {  // more pairs than threads keep
            expect_sum_of_ranks({dtype}, shape);
        }
    }
}

TEST(MoeSlicesCuda, ranks_of_int4_experts_add_up_to_the_layer) {
    for (const Shape& shape : {Shape{1, 256, 96, 8, 192, 64, 2},   // one token
                               Shape{8, 256, 48, 8, 384, 0, 2},    // few tokens
                               Shape{5, 384, 96, 8, 192, 64, 2},   // narrow experts of few tokens
                               Shape{16, 256, 192, 8, 192, 0, 2},  //
                               Shape{60, 256, 96, 8, 192, 64, 2},  // narrow experts without a plan
                               Shape{200, 256, 96, 8, 192, 0, 4},  // and with one
                               Shape{40, 256, 48, 8, 768, 64, 2},  // the list of tiles
                               Shape{300, 128, 16, 8, 768, 0, 2},  // x in the order of the rows
                               Shape{600, 128, 48, 8, 384, 0, 2}}) {
        expect_sum_of_ranks(kInt4, shape);
    }
}

TEST(MoeSlicesCuda, ranks_of_experts_in_blocks_of_fp8_add_up_to_the_layer) {
    for (const Shape& shape : {Shape{1, 256, 96, 8, 128, 64, 2}, Shape{8, 256, 48, 8, 384, 0, 2},
                               Shape{40, 256, 96, 8, 192, 64, 4}, Shape{60, 256, 48, 8, 768, 0, 2},
                               Shape{300, 128, 16, 8, 768, 64, 2}, Shape{600, 128, 48, 8, 384, 0, 2}}) {
        expect_sum_of_ranks(kBlocks, shape);
    }
}

// No id is the rank's.
void expect_nothing_routed(const Kind& kind, const Shape& s) {
    const Layer layer(kind, s);
    std::mt19937 random(5);
    const std::vector<uint16_t> y = random_values(random, s.tokens * s.hidden, 1, false).bf16;
    // As another rank's, which has the layer's ids of some further layer.
    std::vector<int32_t> chosen = layer.chosen_by(0, s.experts);
    for (size_t i = 0; i < chosen.size(); ++i) {
        const auto experts = static_cast<int32_t>(s.experts);
        const bool inside = chosen[i] >= 0 && chosen[i] < experts;
        chosen[i] = !inside ? chosen[i] : i % 2 == 0 ? chosen[i] - experts : chosen[i] + experts;
    }
    for (const bool invariant : {false, true}) {
        const std::vector<float> got =
            layer.run(layer.rank(0, s.experts, s.shared_width > 0), chosen, y, invariant);
        const std::string name = name_of(kind, s) + (invariant ? " batch_invariant" : "");
        if (s.shared_width == 0) {
            EXPECT_TRUE(got == bf16_values(y)) << name;
            continue;
        }
        const std::vector<float> shared = layer.run(layer.shared_alone(), {0}, y, invariant);
        const double error = relative_error(got, std::vector<double>(shared.begin(), shared.end()));
        std::printf("moe %s: nothing routed, and the shared expert alone %.2e apart\n", name.c_str(), error);
        EXPECT_LT(error, kind.shared() == DType::kBFloat16 ? 4e-3 : 6e-3) << name;
    }
}

TEST(MoeSlicesCuda, a_rank_without_a_pair_adds_the_shared_expert_alone) {
    for (const DType dtype : {DType::kBFloat16, DType::kFloat8E4M3}) {
        for (const int64_t shared : {0, 192}) {
            for (const Shape& shape :
                 {Shape{1, 256, 24, 8, 192, shared, 1}, Shape{8, 256, 48, 8, 384, shared, 1},
                  Shape{24, 256, 96, 8, 128, shared, 1}, Shape{12, 64, 300, 8, 48, shared, 1},
                  Shape{70, 256, 96, 8, 192, shared, 1}, Shape{300, 128, 24, 4, 192, shared, 1},
                  Shape{600, 64, 4, 4, 768, shared, 1}, Shape{2500, 32, 16, 8, 48, shared, 1}}) {
                expect_nothing_routed({dtype}, shape);
            }
        }
    }
    for (const int64_t shared : {0, 64}) {
        for (const Shape& shape :
             {Shape{1, 256, 48, 8, 128, shared, 1}, Shape{8, 256, 48, 8, 384, shared, 1},
              Shape{5, 256, 96, 8, 192, shared, 1}, Shape{16, 256, 24, 8, 192, shared, 1},
              Shape{60, 256, 48, 8, 192, shared, 1}, Shape{200, 256, 24, 8, 192, shared, 1},
              Shape{40, 256, 48, 8, 768, shared, 1}, Shape{300, 128, 8, 8, 768, shared, 1},
              Shape{600, 128, 48, 8, 384, shared, 1}}) {
            expect_nothing_routed(kInt4, shape);
        }
        for (const Shape& shape :
             {Shape{1, 256, 48, 8, 128, shared, 1}, Shape{40, 256, 48, 8, 768, shared, 1},
              Shape{300, 128, 8, 8, 768, shared, 1}, Shape{600, 128, 48, 8, 384, shared, 1}}) {
            expect_nothing_routed(kBlocks, shape);
        }
    }
}

}  // namespace
}  // namespace tessera

// The cases of routed experts in grouped weights on the device: activations are quantised within.
#pragma once

#include "ops/moe/cuda/moe_routed_case.h"
#include "ops/moe/w4_layout.h"
#include "ops/moe/w8_layout.h"

namespace tessera {

struct MoeGroupedSpec {
    std::string name;
    RoutingSpec routing;
    int64_t hidden = 4096;
    int64_t width = 1536;
};

// Units of one kind: random codes, scales near a normal distribution about zero.
class W4Noise {
  public:
    static constexpr DType kDType = DType::kInt4;
    static constexpr double kWeightBytes = 0.516;
    static int64_t expert_bytes(int64_t hidden, int64_t width) {
        return w4_gate_up_bytes(hidden, width) + w4_down_bytes(hidden, width);
    }

    // Codes have a deviation of 4.6.
    W4Noise(const CudaCaseData& data, int64_t units, int64_t inputs, uint64_t scales_seed)
        : units_(units),
          inputs_(inputs),
          groups_((inputs + kGroupedInputs - 1) / kGroupedInputs),
          codes_(data, units * w4_unit_bytes(inputs), data.sets),
          scales_(data, units * groups_ * kGroupedUnitRows,
                  {scales_seed, 0.22f / std::sqrt(static_cast<float>(inputs))}) {
        for (int set = 0; set < data.sets; ++set) {
            fill_noise_bytes_cuda(nullptr, codes_.at(set), units * w4_unit_bytes(inputs), seed(set));
            for (int64_t g = 0; g < groups_; ++g) {
                cuda_check(cudaMemcpy2D(
                    codes_.at(set) + g * kW4GroupBytes, static_cast<size_t>(w4_unit_bytes(inputs)),
                    scales_.at(set) + g * kW4ScaleBytes, static_cast<size_t>(groups_ * kW4ScaleBytes),
                    kW4ScaleBytes, static_cast<size_t>(units), cudaMemcpyDeviceToDevice));
            }
        }
        cuda_check(cudaDeviceSynchronize());
    }
    const std::byte* at(int set) const { return codes_.at(set); }
    // The dot product of a unit's row and x; set 0.
    double dot(int64_t unit, int64_t row, const std::vector<double>& x) const {
        double sum = 0;
        for (int64_t g = 0; g < groups_; ++g) {
            double part = 0;
            for (int64_t k = g * kGroupedInputs; k < std::min((g + 1) * kGroupedInputs, inputs_); ++k) {
                const W4Place place = w4_place(row, k);
                const auto index = static_cast<uint64_t>(unit * w4_unit_bytes(inputs_) + place.byte);
                part += x[static_cast<size_t>(k)] * w4_code(noise_byte(seed(0), index) >> place.shift & 15);
            }
            const W4Place place = w4_place(row, g * kGroupedInputs);
            const int64_t scale = (place.scale - g * kW4GroupBytes) / 2;
            sum += part * static_cast<double>(scales_.value((unit * groups_ + g) * kGroupedUnitRows + scale));
        }
        return sum;
    }

  private:
    static uint64_t seed(int set) { return 77 + static_cast<uint64_t>(set); }

    int64_t units_;
    int64_t inputs_;
    int64_t groups_;
    DeviceScratch codes_;
    DeviceNoise scales_;
};

// The same of e4m3 with a scale for each block; all sets have the same scales.
class W8Noise {
  public:
    static constexpr DType kDType = DType::kFloat8E4M3;
    static constexpr double kWeightBytes = 1.002;
    static int64_t expert_bytes(int64_t hidden, int64_t width) {
        return w8_gate_up_bytes(hidden, width) + w8_down_bytes(hidden, width);
    }

    W8Noise(const CudaCaseData& data, int64_t units, int64_t inputs, uint64_t scales_seed)
        : unit_bytes_(w8_unit_bytes(inputs)),
          inputs_(inputs),
          weights_(data, units * unit_bytes_, {scales_seed, 8, DType::kFloat8E4M3}) {
        OpRandom random(scales_seed);
        const int64_t groups = units * unit_bytes_ / kW8GroupBytes;
        const float deviation = 1 / (8 * std::sqrt(static_cast<float>(inputs)));
        for (int64_t i = 0; i < groups * kScales; ++i) {
            scales_.push_back(deviation * (1 + random.uniform() / 2));
        }
        for (int set = 0; set < data.sets; ++set) {
            cuda_check(cudaMemcpy2D(weights_.at(set), static_cast<size_t>(kW8GroupBytes), scales_.data(),
                                    kW8ScaleBytes, kW8ScaleBytes, static_cast<size_t>(groups),
                                    cudaMemcpyHostToDevice));
        }
        cuda_check(cudaDeviceSynchronize());
    }
    const std::byte* at(int set) const { return weights_.at(set); }
    // The dot product of a unit's row and x; set 0.
    double dot(int64_t unit, int64_t row, const std::vector<double>& x) const {
        double sum = 0;
        for (int64_t k = 0; k < inputs_; ++k) {
            const W8Place place = w8_place(row, k);
            const int64_t group = unit * (unit_bytes_ / kW8GroupBytes) + k / kGroupedInputs;
            const float scale =
                scales_[static_cast<size_t>(group * kScales + place.scale % kW8GroupBytes / 4)];
            sum += x[static_cast<size_t>(k)] * static_cast<double>(scale) *
                   static_cast<double>(weights_.value(unit * unit_bytes_ + place.byte));
        }
        return sum;
    }

  private:
    static constexpr int64_t kScales = kW8ScaleBytes / 4;  // of a unit and group

    int64_t unit_bytes_;
    int64_t inputs_;
    DeviceNoise weights_;
    std::vector<float> scales_;
};

// Noise: W4Noise or W8Noise.
template <typename Noise>
class MoeGroupedCudaCase : public MoeRoutedCase {
  public:
    MoeGroupedCudaCase(const CudaCaseData& data, const MoeGroupedSpec& spec)
        : MoeRoutedCase(data, spec.routing, spec.hidden),
          spec_(spec),
          gate_up_(data, spec.routing.experts * (spec.width / 32), spec.hidden, seed()),
          down_(data, spec.routing.experts * (spec.hidden / kGroupedUnitRows), spec.width, seed()) {
        for (int set = 0; set < data.sets; ++set) {
            add_weights(data, {.dtype = Noise::kDType,
                               .fp8_blocks = Noise::kDType == DType::kFloat8E4M3,
                               .hidden = spec.hidden,
                               .experts = spec.routing.experts,
                               .width = spec.width,
                               .gate_up = gate_up_.at(set),
                               .down = down_.at(set)});
        }
    }

    CudaCosts costs() const {
        const ExpertCounts mean = counts();
        const int64_t one = Noise::expert_bytes(spec_.hidden, spec_.width);
        return {
            .bytes = static_cast<int64_t>(mean.experts * static_cast<double>(one)) +
                     6 * spec_.routing.tokens * spec_.hidden,
            .flops = static_cast<int64_t>(6 * mean.pairs * static_cast<double>(spec_.width)) * spec_.hidden,
            .unit = CudaUnit::kFloat8};
    }

  private:
    uint64_t seed() { return random_.next() & 0xFFFFFF; }

    std::vector<double> reference(int64_t t, const std::vector<int64_t>& columns,
                                  ThreadPool& threads) const override {
        std::vector<float> x(static_cast<size_t>(spec_.hidden));
        for (int64_t h = 0; h < spec_.hidden; ++h) {
            x[static_cast<size_t>(h)] = x_.value(t * spec_.hidden + h);
        }
        const std::vector<double> x8 = quantised_row<double>(x);
        std::vector<double> sum(columns.size());
        for (int64_t i = 0; i < routing_.k; ++i) {
            const auto at = static_cast<size_t>(t * routing_.k + i);
            if (chosen_[0][at] < 0) {
                continue;
            }
            const std::vector<double> out = expert(chosen_[0][at], x8, columns, threads);
            for (size_t c = 0; c < sum.size(); ++c) {
                sum[c] += static_cast<double>(shares_[at]) * out[c];
            }
        }
        return sum;
    }
    std::vector<double> expert(int64_t e, const std::vector<double>& x, const std::vector<int64_t>& columns,
                               ThreadPool& threads) const {
        std::vector<float> act(static_cast<size_t>(spec_.width));
        threads.parallel_for(spec_.width, [&](int64_t f, int) {
            const int64_t unit = e * (spec_.width / 32) + f / 32;
            const double gate = gate_up_.dot(unit, grouped_gate_row(f), x);
            const double up = gate_up_.dot(unit, grouped_gate_row(f) + 8, x);
            act[static_cast<size_t>(f)] = rounded_bf16(static_cast<float>(gate / (1 + std::exp(-gate)) * up));
        });
        const std::vector<double> act8 = quantised_row<double>(act);
        std::vector<double> out(columns.size());
        threads.parallel_for(static_cast<int64_t>(columns.size()), [&](int64_t i, int) {
            const int64_t row = columns[static_cast<size_t>(i)];
            out[static_cast<size_t>(i)] = down_.dot(
                e * (spec_.hidden / kGroupedUnitRows) + row / kGroupedUnitRows, row % kGroupedUnitRows, act8);
        });
        return out;
    }

    MoeGroupedSpec spec_;
    Noise gate_up_, down_;
};

template <typename Noise>
CudaOpCase moe_grouped_cuda_case(const MoeGroupedSpec& spec, bool bench) {
    const double bytes = experts_reached(spec.routing) * static_cast<double>(spec.width * 3 * spec.hidden) *
                         Noise::kWeightBytes;
    return {fmt::format("{}{}tokens={} hidden={} experts={} k={} width={}{}", spec.name,
                        spec.name.empty() ? "" : " ", spec.routing.tokens, spec.hidden, spec.routing.experts,
                        spec.routing.k, spec.width, spec.routing.kind()),
            Noise::kDType == DType::kInt4 ? "int4" : "fp8", bench,
            [=](const CudaCaseData& data) {
                auto run = std::make_shared<MoeGroupedCudaCase<Noise>>(data, spec);
                const CudaCosts costs = run->costs();
                return make_cuda_run(std::move(run), data.sets, costs);
            },
            static_cast<int64_t>(bytes)};
}

inline std::vector<CudaOpCase> moe_w4_cuda_cases() {
    std::vector<CudaOpCase> cases;
    for (const MoeGroupedSpec& spec : {MoeGroupedSpec{"", {1, 16, 4}, 256, 128},
                                       MoeGroupedSpec{"", {1, 24, 8}, 4096, 192},
                                       MoeGroupedSpec{"", {1, 16, 8, false, true}, 640, 192},
                                       MoeGroupedSpec{"", {7, 16, 4, true}, 256, 128},
                                       MoeGroupedSpec{"", {8, 24, 8}, 1152, 320},
                                       MoeGroupedSpec{"", {16, 6, 4}, 384, 64},
                                       MoeGroupedSpec{"", {63, 8, 2}, 384, 192},
                                       MoeGroupedSpec{"", {65, 4, 2}, 256, 320},
                                       MoeGroupedSpec{"", {129, 2, 1, false, true}, 640, 64},
                                       MoeGroupedSpec{"", {200, 3, 2, true}, 256, 128},
                                       MoeGroupedSpec{"", {300, 4, 2}, 256, 1536},
                                       MoeGroupedSpec{"", {100, 24, 4, false, true}, 384, 128},
                                       MoeGroupedSpec{"", {40, 24, 4, false, true}, 384, 192},
                                       MoeGroupedSpec{"", {9, 300, 8}, 256, 192},
                                       MoeGroupedSpec{"", {150, 24, 4, true, true}, 1152, 192},
                                       MoeGroupedSpec{"", {120, 32, 8, true}, 640, 192},
                                       MoeGroupedSpec{"", {1024, 192, 8, false, false, true}, 256, 192},
                                       MoeGroupedSpec{"", {40, 24, 4, false, true}, 384, 640},
                                       MoeGroupedSpec{"", {60, 24, 4, true}, 640, 640},
                                       MoeGroupedSpec{"", {20, 16, 4}, 256, 1088},
                                       MoeGroupedSpec{"", {20, 96, 8}, 256, 384},
                                       MoeGroupedSpec{"", {33, 48, 8}, 256, 768},
                                       MoeGroupedSpec{"", {150, 48, 8, true}, 128, 384}}) {
        cases.push_back(moe_grouped_cuda_case<W4Noise>(spec, false));
    }
    for (MoeGroupedSpec spec : {MoeGroupedSpec{.name = "whole"}, MoeGroupedSpec{.name = "TP8", .width = 192},
                                MoeGroupedSpec{.name = "EP8", .routing = {.experts = 24}}}) {
        for (const int64_t tokens : {1, 8, 16, 64, 128, 512, 1024, 4096}) {
            spec.routing.tokens = tokens;
            cases.push_back(moe_grouped_cuda_case<W4Noise>(spec, true));
        }
    }
    for (const int64_t tokens : {64, 512, 4096}) {
        cases.push_back(moe_grouped_cuda_case<W4Noise>({"whole", {.tokens = tokens, .zipf = true}}, true));
    }
    cases.push_back(moe_grouped_cuda_case<W4Noise>({"whole", {.tokens = 4096, .hot = true}}, true));
    return cases;
}

// Blocks of 128 outputs are cut by experts, not by their width.
inline std::vector<CudaOpCase> moe_w8_cuda_cases() {
    std::vector<CudaOpCase> cases;
    for (const MoeGroupedSpec& spec :
         {MoeGroupedSpec{"", {1, 16, 4}, 256, 128}, MoeGroupedSpec{"", {7, 16, 4, true}, 256, 128},
          MoeGroupedSpec{"", {63, 8, 2}, 384, 192}, MoeGroupedSpec{"", {65, 4, 2}, 256, 320},
          MoeGroupedSpec{"", {129, 2, 1, false, true}, 640, 64}, MoeGroupedSpec{"", {300, 4, 2}, 256, 1536},
          MoeGroupedSpec{"", {400, 3, 2, true}, 1152, 576}, MoeGroupedSpec{"", {20, 16, 4}, 256, 1088},
          MoeGroupedSpec{"", {20, 96, 8}, 256, 384}, MoeGroupedSpec{"", {33, 48, 8}, 256, 768}}) {
        cases.push_back(moe_grouped_cuda_case<W8Noise>(spec, false));
    }
    for (MoeGroupedSpec spec :
         {MoeGroupedSpec{.name = "whole"}, MoeGroupedSpec{.name = "EP8", .routing = {.experts = 24}}}) {
        for (const int64_t tokens : {1, 8, 64, 512, 1024, 4096}) {
            spec.routing.tokens = tokens;
            cases.push_back(moe_grouped_cuda_case<W8Noise>(spec, true));
        }
    }
    return cases;
}

}  // namespace tessera

// The cases of routed experts in int4 on the device: activations are quantised within.
#pragma once

#include "ops/moe/cuda/moe_routed_case.h"
#include "ops/moe/w4_layout.h"

namespace tessera {

struct MoeW4Spec {
    std::string name;
    RoutingSpec routing;
    int64_t hidden = 4096;
    int64_t width = 1536;
};

// Units of one kind: random codes, scales near a normal distribution about zero.
class W4Noise {
  public:
    W4Noise(const CudaCaseData& data, int64_t units, int64_t inputs, const NoiseSpec& scales)
        : units_(units),
          inputs_(inputs),
          groups_((inputs + kW4Group - 1) / kW4Group),
          codes_(data, units * w4_unit_bytes(inputs), data.sets),
          scales_(data, units * groups_ * kW4UnitRows, scales) {
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
            for (int64_t k = g * kW4Group; k < std::min((g + 1) * kW4Group, inputs_); ++k) {
                const W4Place place = w4_place(row, k);
                const auto index = static_cast<uint64_t>(unit * w4_unit_bytes(inputs_) + place.byte);
                part += x[static_cast<size_t>(k)] * w4_code(noise_byte(seed(0), index) >> place.shift & 15);
            }
            const W4Place place = w4_place(row, g * kW4Group);
            const int64_t scale = (place.scale - g * kW4GroupBytes) / 2;
            sum += part * static_cast<double>(scales_.value((unit * groups_ + g) * kW4UnitRows + scale));
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

class MoeW4CudaCase : public MoeRoutedCase {
  public:
    MoeW4CudaCase(const CudaCaseData& data, const MoeW4Spec& spec)
        : MoeRoutedCase(data, spec.routing, spec.hidden),
          spec_(spec),
          gate_up_(data, spec.routing.experts * (spec.width / 32), spec.hidden, scales(spec.hidden)),
          down_(data, spec.routing.experts * (spec.hidden / kW4UnitRows), spec.width, scales(spec.width)) {
        for (int set = 0; set < data.sets; ++set) {
            add_weights(data, {.dtype = DType::kInt4,
                               .hidden = spec.hidden,
                               .experts = spec.routing.experts,
                               .width = spec.width,
                               .gate_up = gate_up_.at(set),
                               .down = down_.at(set)});
        }
    }

    CudaCosts costs() const {
        const ExpertCounts mean = counts();
        const int64_t one =
            w4_gate_up_bytes(spec_.hidden, spec_.width) + w4_down_bytes(spec_.hidden, spec_.width);
        return {
            .bytes = static_cast<int64_t>(mean.experts * static_cast<double>(one)) +
                     6 * spec_.routing.tokens * spec_.hidden,
            .flops = static_cast<int64_t>(6 * mean.pairs * static_cast<double>(spec_.width)) * spec_.hidden,
            .unit = CudaUnit::kFloat8};
    }

  private:
    // Codes have a deviation of 4.6.
    NoiseSpec scales(int64_t inputs) {
        return {random_.next() & 0xFFFFFF, 0.22f / std::sqrt(static_cast<float>(inputs))};
    }

    std::vector<double> reference(int64_t t, const std::vector<int64_t>& columns,
                                  ThreadPool& threads) const override {
        std::vector<float> x(static_cast<size_t>(spec_.hidden));
        for (int64_t h = 0; h < spec_.hidden; ++h) {
            x[static_cast<size_t>(h)] = x_.value(t * spec_.hidden + h);
        }
        const std::vector<double> x8 = quantised(x);
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
    static std::vector<double> quantised(const std::vector<float>& row) {
        float largest = 0;
        for (const float value : row) {
            largest = std::max(largest, std::fabs(value));
        }
        const float scale = e4m3_row_scale(largest);
        std::vector<double> out;
        for (const float value : row) {
            out.push_back(static_cast<double>(round_to_e4m3(value / scale)) * static_cast<double>(scale));
        }
        return out;
    }
    std::vector<double> expert(int64_t e, const std::vector<double>& x, const std::vector<int64_t>& columns,
                               ThreadPool& threads) const {
        std::vector<float> act(static_cast<size_t>(spec_.width));
        threads.parallel_for(spec_.width, [&](int64_t f, int) {
            const int64_t unit = e * (spec_.width / 32) + f / 32;
            const double gate = gate_up_.dot(unit, w4_gate_row(f), x);
            const double up = gate_up_.dot(unit, w4_gate_row(f) + 8, x);
            act[static_cast<size_t>(f)] = rounded_bf16(static_cast<float>(gate / (1 + std::exp(-gate)) * up));
        });
        const std::vector<double> act8 = quantised(act);
        std::vector<double> out(columns.size());
        threads.parallel_for(static_cast<int64_t>(columns.size()), [&](int64_t i, int) {
            const int64_t row = columns[static_cast<size_t>(i)];
            out[static_cast<size_t>(i)] =
                down_.dot(e * (spec_.hidden / kW4UnitRows) + row / kW4UnitRows, row % kW4UnitRows, act8);
        });
        return out;
    }

    MoeW4Spec spec_;
    W4Noise gate_up_, down_;
};

inline CudaOpCase moe_w4_cuda_case(const MoeW4Spec& spec, bool bench) {
    const double bytes =
        experts_reached(spec.routing) * static_cast<double>(spec.width * 3 * spec.hidden) * 0.516;
    return {fmt::format("{}{}tokens={} hidden={} experts={} k={} width={}{}", spec.name,
                        spec.name.empty() ? "" : " ", spec.routing.tokens, spec.hidden, spec.routing.experts,
                        spec.routing.k, spec.width, spec.routing.kind()),
            "int4", bench,
            [=](const CudaCaseData& data) {
                auto run = std::make_shared<MoeW4CudaCase>(data, spec);
                const CudaCosts costs = run->costs();
                return make_cuda_run(std::move(run), data.sets, costs);
            },
            static_cast<int64_t>(bytes)};
}

inline std::vector<CudaOpCase> moe_w4_cuda_cases() {
    std::vector<CudaOpCase> cases;
    for (const MoeW4Spec& spec :
         {MoeW4Spec{"", {1, 16, 4}, 256, 128}, MoeW4Spec{"", {7, 16, 4, true}, 256, 128},
          MoeW4Spec{"", {8, 24, 8}, 1152, 320}, MoeW4Spec{"", {16, 6, 4}, 384, 64},
          MoeW4Spec{"", {63, 8, 2}, 384, 192}, MoeW4Spec{"", {65, 4, 2}, 256, 320},
          MoeW4Spec{"", {129, 2, 1, false, true}, 640, 64}, MoeW4Spec{"", {200, 3, 2, true}, 256, 128},
          MoeW4Spec{"", {300, 4, 2}, 256, 1536}, MoeW4Spec{"", {100, 24, 4, false, true}, 384, 128},
          MoeW4Spec{"", {40, 24, 4, false, true}, 384, 192}, MoeW4Spec{"", {9, 300, 8}, 256, 192},
          MoeW4Spec{"", {150, 24, 4, true, true}, 1152, 192}, MoeW4Spec{"", {120, 32, 8, true}, 640, 192},
          MoeW4Spec{"", {1024, 192, 8, false, false, true}, 256, 192},
          MoeW4Spec{"", {40, 24, 4, false, true}, 384, 640}, MoeW4Spec{"", {60, 24, 4, true}, 640, 640},
          MoeW4Spec{"", {20, 16, 4}, 256, 1088}}) {
        cases.push_back(moe_w4_cuda_case(spec, false));
    }
    for (MoeW4Spec spec : {MoeW4Spec{.name = "whole"}, MoeW4Spec{.name = "TP8", .width = 192},
                           MoeW4Spec{.name = "EP8", .routing = {.experts = 24}}}) {
        for (const int64_t tokens : {1, 8, 16, 64, 128, 512, 1024, 4096}) {
            spec.routing.tokens = tokens;
            cases.push_back(moe_w4_cuda_case(spec, true));
        }
    }
    for (const int64_t tokens : {64, 512, 4096}) {
        cases.push_back(moe_w4_cuda_case({"whole", {.tokens = tokens, .zipf = true}}, true));
    }
    cases.push_back(moe_w4_cuda_case({"whole", {.tokens = 4096, .hot = true}}, true));
    return cases;
}

}  // namespace tessera

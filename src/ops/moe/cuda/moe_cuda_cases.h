// The cases of moe on the device: routed and shared experts, and the dense layer.
#pragma once

#include "ops/linear/cuda/linear_cuda.h"
#include "ops/moe/cuda/moe_routed_case.h"

namespace tessera {

struct MoeCudaSpec {
    std::string name;
    RoutingSpec routing;  // no experts: a dense layer
    int64_t hidden = 4096;
    int64_t width = 1536;
    int64_t shared_width = 1536;
    bool fp8 = false;
    bool same_input_scale = true;
    bool given_x8 = false;  // x comes quantised too, as the engine's norm gives it
};

class MoeCudaCase : public MoeRoutedCase {
  public:
    MoeCudaCase(const CudaCaseData& data, const MoeCudaSpec& spec)
        : MoeRoutedCase(data, spec.routing, spec.hidden),
          spec_(spec),
          gate_up_(data, spec.routing.experts * 2 * spec.width * spec.hidden, noise()),
          down_(data, spec.routing.experts * spec.hidden * spec.width, noise()),
          shared_gate_up_(data, 2 * spec.shared_width * spec.hidden, noise()),
          shared_down_(data, spec.hidden * spec.shared_width, noise()),
          gate_up_scales_(scales(2 * spec.routing.experts + 2, weight_scale())),
          down_scales_(scales(spec.routing.experts + 1, weight_scale())),
          down_input_scales_(scales(spec.routing.experts + 1, 0.02f)),
          d_gate_up_scales_(data.budget, gate_up_scales_, 1),
          d_down_scales_(data.budget, down_scales_, 1),
          d_down_input_scales_(data.budget, down_input_scales_, 1) {
        for (int set = 0; set < data.sets; ++set) {
            add_weights(data, tensors(set));
        }
        if (spec.given_x8) {
            const int64_t count = spec.routing.tokens * spec.hidden;
            x8_ = std::make_unique<DeviceScratch>(data, count, data.sets);
            for (int set = 0; set < data.sets; ++set) {
                quantize_cuda(nullptr, {.x = x_.at(set),
                                        .count = count,
                                        .scale = input_scale(spec.routing.experts == 0),
                                        .y = x8_->at(set)});
            }
        }
    }

    // What is read and written at least once, the mean over the sets.
    CudaCosts costs() const {
        const int64_t size = spec_.fp8 ? 1 : 2;
        const int64_t tokens = spec_.routing.tokens;
        const ExpertCounts mean = counts();
        const double routed = mean.experts * 3 * static_cast<double>(spec_.width * spec_.hidden * size);
        const double widths =
            mean.pairs * static_cast<double>(spec_.width) + static_cast<double>(tokens * spec_.shared_width);
        return {.bytes = static_cast<int64_t>(routed) + 3 * spec_.shared_width * spec_.hidden * size +
                         6 * tokens * spec_.hidden,
                .flops = static_cast<int64_t>(6 * widths) * spec_.hidden,
                .unit = spec_.fp8 ? CudaUnit::kFloat8 : CudaUnit::kBFloat16};
    }

  private:
    float weight_scale() const { return spec_.fp8 ? 1.0f / std::sqrt(static_cast<float>(spec_.hidden)) : 1; }
    // Of the next matrix.
    NoiseSpec noise() {
        const float deviation = spec_.fp8 ? 1.0f : 1.0f / std::sqrt(static_cast<float>(spec_.hidden));
        return {random_.next() & 0xFFFFFF, deviation, spec_.fp8 ? DType::kFloat8E4M3 : DType::kBFloat16};
    }
    std::vector<float> scales(int64_t count, float about) {
        std::vector<float> out(static_cast<size_t>(count));
        for (float& value : out) {
            value = spec_.fp8 ? about * (1 + 0.5f * random_.uniform()) : 1;
        }
        return out;
    }
    float input_scale(bool shared) const { return shared && !spec_.same_input_scale ? 0.017f : 0.011f; }

    MoeCudaTensors tensors(int set) const {
        return {.dtype = spec_.fp8 ? DType::kFloat8E4M3 : DType::kBFloat16,
                .hidden = spec_.hidden,
                .experts = spec_.routing.experts,
                .width = spec_.width,
                .shared_width = spec_.shared_width,
                .gate_up = gate_up_.at(set),
                .down = down_.at(set),
                .shared_gate_up = shared_gate_up_.at(set),
                .shared_down = shared_down_.at(set),
                .gate_up_scale = d_gate_up_scales_.at(0),
                .down_scale = d_down_scales_.at(0),
                .down_input_scale = d_down_input_scales_.at(0),
                .shared_gate_up_scale = d_gate_up_scales_.at(0) + 2 * spec_.routing.experts,
                .shared_down_scale = d_down_scales_.at(0) + spec_.routing.experts,
                .shared_down_input_scale = d_down_input_scales_.at(0) + spec_.routing.experts,
                .input_scale = input_scale(false),
                .shared_input_scale = input_scale(true)};
    }
    std::vector<double> reference(int64_t t, const std::vector<int64_t>& columns,
                                  ThreadPool& threads) const override {
        std::vector<double> sum(columns.size());
        const auto add = [&](int64_t e, double share) {
            const std::vector<double> out = expert(t, e, columns, threads);
            for (size_t i = 0; i < sum.size(); ++i) {
                sum[i] += share * out[i];
            }
        };
        for (int64_t i = 0; i < routing_.k; ++i) {
            const auto at = static_cast<size_t>(t * routing_.k + i);
            if (chosen_[0][at] >= 0) {
                add(chosen_[0][at], shares_[at]);
            }
        }
        if (spec_.shared_width > 0) {
            add(spec_.routing.experts, 1);
        }
        return sum;
    }
    double quantised(float value, float scale) const {
        return spec_.fp8 ? static_cast<double>(round_to_e4m3(value / scale)) * scale
                         : static_cast<double>(value);
    }
    // Expert e (= experts: the shared one), rounded where the operator rounds.
    std::vector<double> expert(int64_t t, int64_t e, const std::vector<int64_t>& columns,
                               ThreadPool& threads) const {
        const bool shared = e == spec_.routing.experts;
        const int64_t width = shared ? spec_.shared_width : spec_.width;
        const DeviceNoise& gate_up = shared ? shared_gate_up_ : gate_up_;
        const DeviceNoise& down = shared ? shared_down_ : down_;
        const int64_t first = shared ? 0 : e;
        const auto index = static_cast<size_t>(e);
        std::vector<double> x(static_cast<size_t>(spec_.hidden));
        for (int64_t h = 0; h < spec_.hidden; ++h) {
            x[static_cast<size_t>(h)] = quantised(x_.value(t * spec_.hidden + h), input_scale(shared));
        }
        const auto dot = [&](const DeviceNoise& weight, int64_t row, const std::vector<double>& in) {
            const auto count = static_cast<int64_t>(in.size());
            double sum = 0;
            for (int64_t i = 0; i < count; ++i) {
                sum += in[static_cast<size_t>(i)] * static_cast<double>(weight.value(row * count + i));
            }
            return sum;
        };
        std::vector<double> act(static_cast<size_t>(width));
        threads.parallel_for(width, [&](int64_t f, int) {
            const double gate =
                dot(gate_up, first * 2 * width + f, x) * static_cast<double>(gate_up_scales_[2 * index]);
            const double up = dot(gate_up, first * 2 * width + width + f, x) *
                              static_cast<double>(gate_up_scales_[2 * index + 1]);
            const float value = rounded_bf16(static_cast<float>(gate / (1 + std::exp(-gate)) * up));
            act[static_cast<size_t>(f)] = quantised(value, down_input_scales_[index]);
        });
        std::vector<double> out(columns.size());
        threads.parallel_for(static_cast<int64_t>(columns.size()), [&](int64_t i, int) {
            const auto at = static_cast<size_t>(i);
            out[at] =
                dot(down, first * spec_.hidden + columns[at], act) * static_cast<double>(down_scales_[index]);
        });
        return out;
    }

    MoeCudaSpec spec_;
    DeviceNoise gate_up_, down_, shared_gate_up_, shared_down_;
    std::vector<float> gate_up_scales_, down_scales_, down_input_scales_;
    DeviceArray<float> d_gate_up_scales_, d_down_scales_, d_down_input_scales_;
};

inline CudaOpCase moe_cuda_case(const MoeCudaSpec& spec, bool bench) {
    const double widths = experts_reached(spec.routing) * static_cast<double>(spec.width) +
                          static_cast<double>(spec.shared_width);
    return {fmt::format("{}{}tokens={} hidden={} experts={} k={} width={} shared={}{}", spec.name,
                        spec.name.empty() ? "" : " ", spec.routing.tokens, spec.hidden, spec.routing.experts,
                        spec.routing.k, spec.width, spec.shared_width, spec.routing.kind()),
            spec.fp8 ? "fp8_e4m3" : "bfloat16", bench,
            [=](const CudaCaseData& data) {
                auto run = std::make_shared<MoeCudaCase>(data, spec);
                const CudaCosts costs = run->costs();
                return make_cuda_run(std::move(run), data.sets, costs);
            },
            static_cast<int64_t>(widths) * 3 * spec.hidden * (spec.fp8 ? 1 : 2)};
}

inline std::vector<CudaOpCase> moe_cuda_cases() {
    std::vector<CudaOpCase> cases;
    const auto add = [&](MoeCudaSpec spec, bool fp8, bool bench) {
        spec.fp8 = fp8;
        spec.given_x8 = fp8 && bench;
        cases.push_back(moe_cuda_case(spec, bench));
    };
    for (const bool fp8 : {false, true}) {
        add({"", {1, 16, 4}, 256, 128, 128}, fp8, false);
        add({"", {7, 16, 4, true}, 256, 128, 128, fp8, false}, fp8, false);
        add({"", {16, 6, 4}, 352, 144, 80}, fp8, false);
        add({"", {63, 8, 2}, 144, 80, 48}, fp8, false);  // tails along every dimension
        add({"", {65, 4, 2}, 256, 192, 192, fp8, false}, fp8, false);
        add({"", {129, 2, 1, false, true}, 272, 144, 0, fp8}, fp8, false);
        add({"", {200, 3, 2, true}, 256, 128, 256, fp8}, fp8, false);
        add({"", {300, 16, 4, true}, 256, 192, 192}, fp8, false);
        add({"", {20, 96, 8}, 256, 384, 384}, fp8, false);  // cuts by two and by four
        add({"", {33, 48, 8}, 256, 768, 768}, fp8, false);
        add({"", {150, 48, 8, true}, 128, 384, 0}, fp8, false);
        add({"", {40, 16, 8}, 256, 640, 640}, fp8, false);  // some rows of few experts
        add({"", {90, 16, 8, true}, 272, 528, 0}, fp8, false);
        add({"", {33, 40, 8}, 512, 192, 192, fp8, false}, fp8, false);  // narrow experts by clusters
        add({"", {90, 40, 8, true}, 256, 192, 0}, fp8, false);
        add({"", {150, 40, 8}, 256, 192, 192}, fp8, false);
        add({"dense", {33, 0, 0}, 512, 0, 336}, fp8, false);
    }
    // The experts of a rank: all; an eighth of each one's width; an eighth of the experts, when all eight
    // choices of a token fall on them. Without a shared expert, its output is what y holds before.
    const MoeCudaSpec cuts[] = {{.name = "whole"},
                                {.name = "TP8", .width = 192, .shared_width = 192},
                                {.name = "EP8", .routing = {.experts = 24}, .shared_width = 0}};
    for (const bool fp8 : {false, true}) {
        for (MoeCudaSpec spec : cuts) {
            for (const int64_t tokens : {1, 8, 16, 64, 512, 4096}) {
                spec.routing.tokens = tokens;
                add(spec, fp8, true);
            }
        }
        for (const int64_t tokens : {1, 64, 2048}) {
            add({"dense", {tokens, 0, 0}, 4096, 0, 13312}, fp8, true);
        }
    }
    for (MoeCudaSpec spec : {cuts[0], cuts[1]}) {
        spec.shared_width = 0;
        for (const int64_t tokens : {1, 8, 16, 64, 128, 512, 1024, 4096}) {
            spec.routing.tokens = tokens;
            add(spec, true, true);
        }
    }
    for (const MoeCudaSpec& cut : {cuts[1], cuts[2]}) {
        for (const int64_t tokens : {128, 1024}) {
            MoeCudaSpec spec = cut;
            spec.routing.tokens = tokens;
            add(spec, true, true);
        }
    }
    for (const int64_t tokens : {64, 512, 4096}) {
        add({"whole", {.tokens = tokens, .zipf = true}}, true, true);
    }
    add({"whole", {.tokens = 4096, .hot = true}}, true, true);
    return cases;
}

}  // namespace tessera

// The cases of moe on the device: routed and shared experts, and the dense layer.
#pragma once

#include <algorithm>
#include <cmath>
#include <fmt/format.h>
#include <numeric>

#include "base/thread_pool.h"
#include "device/cuda/device_props.h"
#include "ops/cuda/cuda_case.h"
#include "ops/cuda/cuda_noise.h"
#include "ops/linear/cuda/linear_cuda.h"
#include "ops/moe/cuda/moe_cuda.h"

namespace tessera {

struct MoeCudaSpec {
    std::string name;
    int64_t tokens = 1;
    int64_t hidden = 4096;
    int64_t experts = 192;
    int64_t k = 8;
    int64_t width = 1536;
    int64_t shared_width = 1536;
    bool fp8 = false;
    bool same_input_scale = true;
    bool padding = false;   // every third token has no experts
    bool hot = false;       // every token chooses expert 0
    bool given_x8 = false;  // x comes quantised too, as the engine's norm gives it
};

struct RoutingSpec {
    int64_t tokens = 0;
    int64_t experts = 0;
    int64_t k = 0;
    bool padding = false;  // every third token has no experts
    bool hot = false;      // every token chooses expert 0
};
// k of the experts for each token, ascending.
inline std::vector<int32_t> choose_experts(const RoutingSpec& spec, OpRandom& random) {
    std::vector<int32_t> chosen;
    std::vector<int32_t> ids(static_cast<size_t>(spec.experts));
    std::iota(ids.begin(), ids.end(), 0);
    for (int64_t t = 0; t < spec.tokens; ++t) {
        for (int64_t i = spec.hot ? 1 : 0; i < spec.k; ++i) {
            const auto other = static_cast<size_t>(i + random.below(spec.experts - i));
            std::swap(ids[static_cast<size_t>(i)], ids[other]);
        }
        std::vector<int32_t> mine(ids.begin(), ids.begin() + spec.k);
        std::sort(mine.begin(), mine.end());
        for (const int32_t id : mine) {
            chosen.push_back(spec.padding && t % 3 == 2 ? -1 : id);
        }
    }
    return chosen;
}

struct ExpertCounts {
    int64_t experts = 0;  // that some token chose
    int64_t pairs = 0;
};
inline ExpertCounts count_experts(const std::vector<int32_t>& chosen, int64_t experts) {
    ExpertCounts counts;
    std::vector<bool> used(static_cast<size_t>(experts));
    for (const int32_t id : chosen) {
        if (id >= 0) {
            used[static_cast<size_t>(id)] = true;
            ++counts.pairs;
        }
    }
    counts.experts = std::count(used.begin(), used.end(), true);
    return counts;
}

// Each set has weights and a routing of its own.
class MoeCudaCase {
  public:
    MoeCudaCase(const CudaCaseData& data, const MoeCudaSpec& spec)
        : spec_(spec),
          random_(data.seed),
          x_(data, spec.tokens * spec.hidden, noise(1, false)),
          y_(data, spec.tokens * spec.hidden, noise(1, false)),
          gate_up_(data, spec.experts * 2 * spec.width * spec.hidden, noise(weight_deviation())),
          down_(data, spec.experts * spec.hidden * spec.width, noise(weight_deviation())),
          shared_gate_up_(data, 2 * spec.shared_width * spec.hidden, noise(weight_deviation())),
          shared_down_(data, spec.hidden * spec.shared_width, noise(weight_deviation())),
          gate_up_scales_(scales(2 * spec.experts + 2, weight_scale())),
          down_scales_(scales(spec.experts + 1, weight_scale())),
          down_input_scales_(scales(spec.experts + 1, 0.02f)),
          d_gate_up_scales_(data.budget, gate_up_scales_, 1),
          d_down_scales_(data.budget, down_scales_, 1),
          d_down_input_scales_(data.budget, down_input_scales_, 1) {
        const Result<DeviceProps> device = open_device(0);
        tessera::check(device.ok(), "no device");
        sm_count_ = device->sm_count;
        for (int set = 0; set < data.sets; ++set) {
            weights_.push_back(moe_cuda_bind(tensors(set)));
            chosen_.push_back(
                choose_experts({spec.tokens, spec.experts, spec.k, spec.padding, spec.hot}, random_));
            d_chosen_.push_back(std::make_unique<DeviceArray<int32_t>>(
                data.budget, spec.k > 0 ? chosen_.back() : std::vector<int32_t>(1), 1));
        }
        shares_.resize(static_cast<size_t>(std::max<int64_t>(spec.tokens * spec.k, 1)));
        for (float& share : shares_) {
            share = 0.3f + 0.2f * random_.uniform();
        }
        d_shares_ = std::make_unique<DeviceArray<float>>(data.budget, shares_, 1);
        if (spec.given_x8) {
            x8_ = std::make_unique<DeviceScratch>(data, spec.tokens * spec.hidden, data.sets);
            for (int set = 0; set < data.sets; ++set) {
                quantize_cuda(nullptr, {.x = x_.at(set),
                                        .count = spec.tokens * spec.hidden,
                                        .scale = input_scale(spec.experts == 0),
                                        .y = x8_->at(set)});
            }
        }
        const int64_t bytes = moe_cuda_workspace_bytes(weights_[0].tensors, spec.tokens, spec.k);
        workspace_ = std::make_unique<DeviceScratch>(data, bytes, 1);
    }

    void launch(cudaStream_t stream, int set) {
        moe_cuda(stream, {.weights = &weights_[static_cast<size_t>(set)],
                          .x = x_.at(set),
                          .x8 = x8_ != nullptr ? reinterpret_cast<const uint8_t*>(x8_->at(set)) : nullptr,
                          .tokens = spec_.tokens,
                          .k = spec_.k,
                          .chosen = d_chosen_[static_cast<size_t>(set)]->at(0),
                          .expert_weights = d_shares_->at(0),
                          .y = y_.at(set),
                          .workspace = workspace_->at(0),
                          .sm_count = sm_count_});
    }
    OpError check(cudaStream_t stream) {
        workspace_->poison();
        y_.refill();
        launch(stream, 0);
        cuda_check(cudaStreamSynchronize(stream));
        std::vector<uint16_t> bits(static_cast<size_t>(spec_.tokens * spec_.hidden));
        copy_blocking(bits.data(), y_.at(0), static_cast<int64_t>(bits.size() * 2));
        const bool large = spec_.hidden * std::max(spec_.width, spec_.shared_width) > (1 << 20);
        const std::vector<int64_t> columns = sampled_indices(spec_.hidden, large ? 64 : 4096, random_);
        std::vector<float> got;
        std::vector<float> want;
        ThreadPool threads(reference_threads());
        for (const int64_t t : sampled_indices(spec_.tokens, large ? 2 : 400, random_)) {
            const std::vector<double> row = reference(t, columns, threads);
            for (size_t i = 0; i < columns.size(); ++i) {
                const int64_t at = t * spec_.hidden + columns[i];
                got.push_back(bf16_to_f32(bits[static_cast<size_t>(at)]));
                want.push_back(static_cast<float>(y_.value(at) + row[i]));
            }
        }
        // The SwiGLU result rounds (bfloat16; then e4m3, where a value may fall the other way), the experts'
        // outputs and their sums too. e4m3 products are summed with 14 bits over the whole of K. One value
        // that falls the other way, an eighth of three deviations, times a weight of two to three, shows in a
        // narrow sum.
        const int64_t width = spec_.width + spec_.shared_width;
        const double fp8 = std::max(0.05, 1.4 / std::sqrt(static_cast<double>(width)));
        OpError error = compare_sums(got, want, spec_.fp8 ? fp8 : 0.02, 0.0157);
        error.mismatches += error.rms > (spec_.fp8 ? 1.2e-2 : 5e-3);
        error += count_unwritten(widen_bf16(bits));
        return error;
    }
    // What is read and written at least once, the mean over the sets.
    CudaCosts costs() const {
        const int64_t size = spec_.fp8 ? 1 : 2;
        double experts = 0;
        int64_t pairs = 0;
        for (const std::vector<int32_t>& chosen : chosen_) {
            const ExpertCounts counts = count_experts(chosen, spec_.experts);
            experts += static_cast<double>(counts.experts);
            pairs += counts.pairs;
        }
        const auto sets = static_cast<double>(chosen_.size());
        const double routed = experts / sets * 3 * static_cast<double>(spec_.width * spec_.hidden * size);
        const double widths = static_cast<double>(pairs * spec_.width) / sets +
                              static_cast<double>(spec_.tokens * spec_.shared_width);
        return {.bytes = static_cast<int64_t>(routed) + 3 * spec_.shared_width * spec_.hidden * size +
                         6 * spec_.tokens * spec_.hidden,
                .flops = static_cast<int64_t>(6 * widths) * spec_.hidden,
                .unit = spec_.fp8 ? CudaUnit::kFloat8 : CudaUnit::kBFloat16};
    }

  private:
    float weight_scale() const { return spec_.fp8 ? 1.0f / std::sqrt(static_cast<float>(spec_.hidden)) : 1; }
    float weight_deviation() const {
        return spec_.fp8 ? 1.0f : 1.0f / std::sqrt(static_cast<float>(spec_.hidden));
    }
    NoiseSpec noise(float deviation, bool weight = true) {
        return {random_.next() & 0xFFFFFF, deviation,
                weight && spec_.fp8 ? DType::kFloat8E4M3 : DType::kBFloat16};
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
                .experts = spec_.experts,
                .width = spec_.width,
                .shared_width = spec_.shared_width,
                .gate_up = gate_up_.at(set),
                .down = down_.at(set),
                .shared_gate_up = shared_gate_up_.at(set),
                .shared_down = shared_down_.at(set),
                .gate_up_scale = d_gate_up_scales_.at(0),
                .down_scale = d_down_scales_.at(0),
                .down_input_scale = d_down_input_scales_.at(0),
                .shared_gate_up_scale = d_gate_up_scales_.at(0) + 2 * spec_.experts,
                .shared_down_scale = d_down_scales_.at(0) + spec_.experts,
                .shared_down_input_scale = d_down_input_scales_.at(0) + spec_.experts,
                .input_scale = input_scale(false),
                .shared_input_scale = input_scale(true)};
    }
    // What the layer adds to the columns of token t, in double.
    std::vector<double> reference(int64_t t, const std::vector<int64_t>& columns, ThreadPool& threads) const {
        std::vector<double> sum(columns.size());
        const auto add = [&](int64_t e, double share) {
            const std::vector<double> out = expert(t, e, columns, threads);
            for (size_t i = 0; i < sum.size(); ++i) {
                sum[i] += share * out[i];
            }
        };
        for (int64_t i = 0; i < spec_.k; ++i) {
            const auto at = static_cast<size_t>(t * spec_.k + i);
            if (chosen_[0][at] >= 0) {
                add(chosen_[0][at], shares_[at]);
            }
        }
        if (spec_.shared_width > 0) {
            add(spec_.experts, 1);
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
        const bool shared = e == spec_.experts;
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
    OpRandom random_;
    DeviceNoise x_, y_, gate_up_, down_, shared_gate_up_, shared_down_;
    std::vector<float> gate_up_scales_, down_scales_, down_input_scales_, shares_;
    DeviceArray<float> d_gate_up_scales_, d_down_scales_, d_down_input_scales_;
    std::unique_ptr<DeviceArray<float>> d_shares_;
    std::vector<std::unique_ptr<DeviceArray<int32_t>>> d_chosen_;
    std::vector<MoeCudaWeights> weights_;
    std::vector<std::vector<int32_t>> chosen_;
    std::unique_ptr<DeviceScratch> x8_;
    std::unique_ptr<DeviceScratch> workspace_;
    int sm_count_ = 0;
};

inline CudaOpCase moe_cuda_case(const MoeCudaSpec& spec, bool bench) {
    // Of the experts that random routing is expected to reach.
    const double missed = spec.experts > 0
                              ? std::pow(1 - static_cast<double>(spec.k) / static_cast<double>(spec.experts),
                                         static_cast<double>(spec.tokens))
                              : 1;
    const double experts = (1 - missed) * static_cast<double>(spec.experts);
    const double widths = experts * static_cast<double>(spec.width) + static_cast<double>(spec.shared_width);
    return {
        fmt::format("{}{}tokens={} hidden={} experts={} k={} width={} shared={}{}{}", spec.name,
                    spec.name.empty() ? "" : " ", spec.tokens, spec.hidden, spec.experts, spec.k, spec.width,
                    spec.shared_width, spec.padding ? " padding" : "", spec.hot ? " hot" : ""),
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
        add({"", 1, 256, 16, 4, 128, 128}, fp8, false);
        add({"", 7, 256, 16, 4, 128, 128, fp8, false, true}, fp8, false);
        add({"", 63, 144, 8, 2, 80, 48}, fp8, false);  // tails along every dimension
        add({"", 65, 256, 4, 2, 192, 192, fp8, false}, fp8, false);
        add({"", 129, 272, 2, 1, 144, 0, fp8, true, false, true}, fp8, false);
        add({"", 200, 256, 3, 2, 128, 256, fp8, true, true}, fp8, false);
        add({"dense", 33, 512, 0, 0, 0, 336}, fp8, false);
    }
    // The routed experts of a rank: all; an eighth of each one's width; an eighth of the experts, when all
    // eight choices of a token fall on them.
    const MoeCudaSpec cuts[] = {{.name = "whole"},
                                {.name = "TP8", .width = 192, .shared_width = 192},
                                {.name = "EP8", .experts = 24, .shared_width = 0}};
    for (const bool fp8 : {false, true}) {
        for (MoeCudaSpec spec : cuts) {
            for (const int64_t tokens : {1, 8, 64, 512, 4096}) {
                spec.tokens = tokens;
                add(spec, fp8, true);
            }
        }
        for (const int64_t tokens : {1, 64, 2048}) {
            add({"dense", tokens, 4096, 0, 0, 0, 13312}, fp8, true);
        }
    }
    return cases;
}

}  // namespace tessera

// What the device cases of routed experts share, whatever the weights: the routing, the call and the
// comparison.
#pragma once

#include <algorithm>
#include <cmath>
#include <fmt/format.h>
#include <memory>
#include <numeric>
#include <string>
#include <vector>

#include "base/thread_pool.h"
#include "device/cuda/device_props.h"
#include "ops/cuda/cuda_case.h"
#include "ops/cuda/cuda_noise.h"
#include "ops/moe/cuda/moe_cuda.h"

namespace tessera {

struct RoutingSpec {
    int64_t tokens = 1;
    int64_t experts = 192;
    int64_t k = 8;
    bool padding = false;  // every third token has no experts
    bool hot = false;      // every token chooses expert 0
    bool zipf = false;     // the n-th expert of a random order is chosen as often as 1 / n

    // What follows the sizes in a case's name.
    std::string kind() const {
        return fmt::format("{}{}{}", padding ? " padding" : "", hot ? " hot" : "", zipf ? " zipf" : "");
    }
};

// k of the experts for each token, ascending.
inline std::vector<int32_t> choose_experts(const RoutingSpec& spec, OpRandom& random) {
    std::vector<int32_t> chosen;
    std::vector<int32_t> ids(static_cast<size_t>(spec.experts));
    std::iota(ids.begin(), ids.end(), 0);
    std::vector<double> rank(ids.begin(), ids.end());
    for (size_t i = 1; spec.zipf && i < rank.size(); ++i) {
        std::swap(rank[i], rank[static_cast<size_t>(random.below(static_cast<int64_t>(i) + 1))]);
    }
    for (int64_t t = 0; t < spec.tokens; ++t) {
        if (spec.zipf) {
            // The k largest of u^(1 / p) are k draws without repetition with the chances p.
            std::vector<std::pair<double, int32_t>> keys;
            for (const int32_t id : ids) {
                const double u = (static_cast<double>(random.uniform()) + 1) / 2;
                keys.emplace_back(std::log(std::max(u, 1e-9)) * (rank[static_cast<size_t>(id)] + 1), id);
            }
            std::partial_sort(keys.begin(), keys.begin() + spec.k, keys.end(), std::greater<>());
            for (int64_t i = 0; i < spec.k; ++i) {
                chosen.push_back(keys[static_cast<size_t>(i)].second);
            }
        } else {
            for (int64_t i = spec.hot ? 1 : 0; i < spec.k; ++i) {
                const auto other = static_cast<size_t>(i + random.below(spec.experts - i));
                std::swap(ids[static_cast<size_t>(i)], ids[other]);
            }
            chosen.insert(chosen.end(), ids.begin(), ids.begin() + spec.k);
        }
        std::sort(chosen.end() - spec.k, chosen.end());
        if (spec.padding && t % 3 == 2) {
            std::fill(chosen.end() - spec.k, chosen.end(), -1);
        }
    }
    return chosen;
}

// A row as grouped weights see it: e4m3 with a scale of its own.
template <typename T>
std::vector<T> quantised_row(const std::vector<float>& row) {
    float largest = 0;
    for (const float value : row) {
        largest = std::max(largest, std::fabs(value));
    }
    const float scale = e4m3_row_scale(largest);
    std::vector<T> out;
    for (const float value : row) {
        out.push_back(static_cast<T>(round_to_e4m3(value / scale)) * static_cast<T>(scale));
    }
    return out;
}

struct ExpertCounts {
    double experts = 0;  // that some token chose
    double pairs = 0;
};

// Each set has weights and a routing of its own.
class MoeRoutedCase {
  public:
    virtual ~MoeRoutedCase() = default;
    MoeRoutedCase(const MoeRoutedCase&) = delete;
    MoeRoutedCase& operator=(const MoeRoutedCase&) = delete;

    void launch(cudaStream_t stream, int set) {
        moe_cuda(stream, {.weights = &weights_[static_cast<size_t>(set)],
                          .x = x_.at(set),
                          .x8 = x8_ != nullptr ? reinterpret_cast<const uint8_t*>(x8_->at(set)) : nullptr,
                          .tokens = routing_.tokens,
                          .k = routing_.k,
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
        const int64_t hidden = weights_[0].tensors.hidden;
        const int64_t width = weights_[0].tensors.width + weights_[0].tensors.shared_width;
        std::vector<uint16_t> bits(static_cast<size_t>(routing_.tokens * hidden));
        copy_blocking(bits.data(), y_.at(0), static_cast<int64_t>(bits.size() * 2));
        const bool large = hidden * width > (2 << 20);
        const std::vector<int64_t> columns = sampled_indices(hidden, large ? 64 : 4096, random_);
        std::vector<float> got;
        std::vector<float> want;
        ThreadPool threads(reference_threads());
        for (const int64_t t : sampled_indices(routing_.tokens, large ? 2 : 400, random_)) {
            const std::vector<double> row = reference(t, columns, threads);
            for (size_t i = 0; i < columns.size(); ++i) {
                const int64_t at = t * hidden + columns[i];
                got.push_back(bf16_to_f32(bits[static_cast<size_t>(at)]));
                want.push_back(static_cast<float>(y_.value(at) + row[i]));
            }
        }
        // The SwiGLU result rounds (bfloat16; then e4m3, where a value may fall the other way), the experts'
        // outputs and their sums too. e4m3 products are summed with 14 bits over the whole of K. One value
        // that falls the other way, an eighth of up to eight deviations (a product of two has long tails),
        // times a weight of two to three, shows in a narrow sum; more such values show in the rms, where
        // two tokens are compared one of them more.
        const bool narrow = weights_[0].tensors.dtype != DType::kBFloat16;
        const double tolerance = narrow ? std::max(0.1, 2.5 / std::sqrt(static_cast<double>(width))) : 0.02;
        OpError error = compare_sums(got, want, tolerance, 0.0157);
        error.mismatches += error.rms > (narrow ? (large ? 2.5e-2 : 1.2e-2) : 5e-3);
        error += count_unwritten(widen_bf16(bits));
        return error;
    }

  protected:
    MoeRoutedCase(const CudaCaseData& data, const RoutingSpec& routing, int64_t hidden)
        : routing_(routing),
          random_(data.seed),
          x_(data, routing.tokens * hidden, {random_.next() & 0xFFFFFF, 1}),
          y_(data, routing.tokens * hidden, {random_.next() & 0xFFFFFF, 1}) {
        const Result<DeviceProps> device = open_device(0);
        tessera::check(device.ok(), "no device");
        sm_count_ = device->sm_count;
        for (int set = 0; set < data.sets; ++set) {
            chosen_.push_back(choose_experts(routing, random_));
            d_chosen_.push_back(std::make_unique<DeviceArray<int32_t>>(
                data.budget, routing.k > 0 ? chosen_.back() : std::vector<int32_t>(1), 1));
        }
        shares_.resize(static_cast<size_t>(std::max<int64_t>(routing.tokens * routing.k, 1)));
        for (float& share : shares_) {
            share = 0.3f + 0.2f * random_.uniform();
        }
        d_shares_ = std::make_unique<DeviceArray<float>>(data.budget, shares_, 1);
    }
    // The weights of the next set.
    void add_weights(const CudaCaseData& data, const MoeCudaTensors& tensors) {
        weights_.push_back(moe_cuda_bind(tensors));
        if (workspace_ == nullptr) {
            workspace_ = std::make_unique<DeviceScratch>(
                data, moe_cuda_workspace_bytes(tensors, routing_.tokens, routing_.k), 1);
        }
    }

    // What the layer adds to the columns of token t, in double.
    virtual std::vector<double> reference(int64_t t, const std::vector<int64_t>& columns,
                                          ThreadPool& threads) const = 0;

    // Means over the sets.
    ExpertCounts counts() const {
        ExpertCounts counts;
        for (const std::vector<int32_t>& chosen : chosen_) {
            std::vector<bool> used(static_cast<size_t>(routing_.experts));
            for (const int32_t id : chosen) {
                if (id >= 0) {
                    used[static_cast<size_t>(id)] = true;
                    ++counts.pairs;
                }
            }
            counts.experts += static_cast<double>(std::count(used.begin(), used.end(), true));
        }
        const auto sets = static_cast<double>(chosen_.size());
        return {counts.experts / sets, counts.pairs / sets};
    }

    RoutingSpec routing_;
    OpRandom random_;
    DeviceNoise x_, y_;
    std::vector<std::vector<int32_t>> chosen_;
    std::vector<float> shares_;
    std::unique_ptr<DeviceScratch> x8_;  // x quantised, where the caller has it

  private:
    int sm_count_ = 0;
    std::vector<MoeCudaWeights> weights_;
    std::vector<std::unique_ptr<DeviceArray<int32_t>>> d_chosen_;
    std::unique_ptr<DeviceArray<float>> d_shares_;
    std::unique_ptr<DeviceScratch> workspace_;
};

// The number of experts that random routing is expected to reach.
inline double experts_reached(const RoutingSpec& routing) {
    const auto experts = static_cast<double>(routing.experts);
    return experts > 0 ? experts * (1 - std::pow(1 - static_cast<double>(routing.k) / experts,
                                                 static_cast<double>(routing.tokens)))
                       : 0;
}

}  // namespace tessera

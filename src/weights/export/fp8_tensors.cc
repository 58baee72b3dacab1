#include "weights/export/fp8_tensors.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <fmt/format.h>

#include "base/check.h"
#include "weights/export/e4m3.h"
#include "weights/export/model_walk.h"

namespace tessera {
namespace {

// The largest magnitude of the weight, by bits without the sign: infinity is above every finite one, and a
// NaN above infinity.
float largest_magnitude(const WeightView& weight, ThreadPool& pool) {
    std::vector<uint32_t> largest(static_cast<size_t>(pool.size()), 0u);
    std::vector<std::vector<float>> rows(largest.size());
    pool.parallel_for(weight.rows, [&](int64_t row, int thread) {
        const auto t = static_cast<size_t>(thread);
        widen_row(weight, row, rows[t]);
        for (const float value : rows[t]) {
            largest[t] = std::max(largest[t], std::bit_cast<uint32_t>(value) & 0x7FFFFFFFu);
        }
    });
    return std::bit_cast<float>(*std::max_element(largest.begin(), largest.end()));
}

void quantize_weight(const WeightView& weight, float scale, ThreadPool& pool, std::span<std::byte> out) {
    check(static_cast<int64_t>(out.size()) == weight.rows * weight.cols,
          "quantize_weight: the output's size");
    std::vector<std::vector<float>> rows(static_cast<size_t>(pool.size()));
    pool.parallel_for(weight.rows, [&](int64_t row, int thread) {
        std::vector<float>& values = rows[static_cast<size_t>(thread)];
        widen_row(weight, row, values);
        std::byte* to = out.data() + row * weight.cols;
        for (const float value : values) {
            *to++ = static_cast<std::byte>(e4m3_code(value / scale));
        }
    });
}

OutputTensor scalar(std::string name, float value) {
    return {.name = std::move(name),
            .dtype = "F32",
            .shape = {1},
            .bytes = sizeof(float),
            .make = [value](std::span<std::byte> out) { std::memcpy(out.data(), &value, sizeof(value)); }};
}

class Fp8Sink : public TensorSink {
  public:
    Fp8Sink(const std::vector<LayerLimits>& limits, ThreadPool& pool) : limits_(limits), pool_(pool) {}

    Result<Fp8Tensors> take() {
        return status_.ok() ? Result<Fp8Tensors>(std::move(tensors_)) : Result<Fp8Tensors>(status_);
    }

    void plain(const std::string& name, const WeightView& view, std::vector<int64_t> shape) override {
        tensors_.weights.push_back(plain_tensor(name, view, std::move(shape)));
    }

    void linear(const std::string& module, const LinearWeights& linear, const LinearPlace& place) override {
        const WeightView weight = linear.weight;
        const float largest = largest_magnitude(weight, pool_);
        if (!std::isfinite(largest) && status_.ok()) {
            status_ = invalid_argument(
                fmt::format("{}.weight: holds {}; every weight must be finite", module, largest));
        }
        const float scale = e4m3_scale(largest);
        tensors_.weights.push_back({.name = module + ".weight",
                                    .dtype = "F8_E4M3",
                                    .shape = {weight.rows, weight.cols},
                                    .bytes = weight.rows * weight.cols,
                                    .make = [weight, scale, &pool = pool_](std::span<std::byte> out) {
                                        quantize_weight(weight, scale, pool, out);
                                    }});
        tensors_.weights.push_back(scalar(module + ".weight_scale", scale));
        tensors_.weights.push_back(scalar(module + ".input_scale", e4m3_scale(input_limit(place))));
    }

    void kv_cache(const std::string& prefix, size_t layer) override {
        tensors_.kv_scales.push_back(scalar(prefix + "k_cache.scale", e4m3_scale(limits_[layer].key)));
        tensors_.kv_scales.push_back(scalar(prefix + "v_cache.scale", e4m3_scale(limits_[layer].value)));
    }

  private:
    float input_limit(const LinearPlace& place) const {
        const LayerLimits& limits = limits_[place.layer];
        switch (place.input) {
            case LinearInput::kAttention:
                return limits.attention_input;
            case LinearInput::kAttentionOutput:
                return limits.output_input;
            case LinearInput::kMlp:
                return limits.mlp_input;
            case LinearInput::kDown:
                return place.routed ? limits.expert_down_input : limits.shared_down_input;
        }
        return 0;
    }

    const std::vector<LayerLimits>& limits_;
    ThreadPool& pool_;
    Fp8Tensors tensors_;
    Status status_;  // the first error
};

}  // namespace

Result<Fp8Tensors> fp8_tensors(const ModelConfig& config, const ModelWeights& weights,
                               const std::vector<LayerLimits>& limits, ThreadPool& pool) {
    check(limits.size() >= weights.layers.size() + (weights.mtp ? 1 : 0),
          "fp8_tensors: a layer without limits");
    Fp8Sink sink(limits, pool);
    walk_model(config, weights, sink);
    return sink.take();
}

}  // namespace tessera

#include "model/cuda/random_weights.h"

#include <cmath>

#include "base/check.h"

namespace tessera {
namespace {

constexpr float kE4m3Deviation = 100;  // the largest draw, 3.47 times that, is below 448

// Static input scales: the largest value that is not cut off, over e4m3's largest. A normed activation lies
// within 5, a SwiGLU of two such within 16.
constexpr float kNormedScale = 5.0f / 448.0f;
constexpr float kSwigluScale = 16.0f / 448.0f;

class Shapes {
  public:
    Shapes(const ModelConfig& config, DType dtype) : config_(config), dtype_(dtype) {}

    static WeightView view(int64_t rows, int64_t cols, DType dtype = DType::kBFloat16) {
        return {.data = nullptr, .dtype = dtype, .rows = rows, .cols = cols};
    }
    WeightView norm() const { return view(1, config_.hidden_size); }
    LinearWeights linear(int64_t outputs, int64_t inputs, float input_scale) const {
        LinearWeights out{.weight = view(outputs, inputs, dtype_)};
        if (dtype_ == DType::kFloat8E4M3) {
            out.weight_scale = 1.0f / (kE4m3Deviation * std::sqrt(static_cast<float>(inputs)));
            out.input_scale = input_scale;
        }
        return out;
    }
    MlpWeights mlp(int64_t width) const {
        const int64_t hidden = config_.hidden_size;
        return {.gate = linear(width, hidden, kNormedScale),
                .up = linear(width, hidden, kNormedScale),
                .down = linear(hidden, width, kSwigluScale)};
    }
    AttentionWeights attention() const {
        const int64_t hidden = config_.hidden_size;
        return {.q = linear(config_.q_width(), hidden, kNormedScale),
                .k = linear(config_.kv_width(), hidden, kNormedScale),
                .v = linear(config_.kv_width(), hidden, kNormedScale),
                .o = linear(hidden, config_.q_width(), kNormedScale),
                .q_norm = view(1, config_.head_dim),
                .k_norm = view(1, config_.head_dim),
                .k_scale = kNormedScale,
                .v_scale = kNormedScale};
    }
    LayerWeights layer(bool moe) const {
        LayerWeights out{.input_norm = norm(),
                         .post_attention_norm = norm(),
                         .attention = attention(),
                         .dense = {},
                         .moe = {}};
        if (!moe) {
            out.dense = mlp(config_.intermediate_size);
            return out;
        }
        MoeWeights& experts = out.moe.emplace();
        experts.router = view(config_.num_experts, config_.hidden_size);
        experts.expert_bias = view(1, config_.num_experts, DType::kFloat32);
        experts.experts.assign(static_cast<size_t>(config_.num_experts), mlp(config_.moe_intermediate_size));
        experts.shared = mlp(config_.shared_width());
        return out;
    }

  private:
    const ModelConfig& config_;
    const DType dtype_;
};

}  // namespace

float random_deviation(DType dtype, int64_t inputs) {
    return dtype == DType::kFloat8E4M3 ? kE4m3Deviation : 1.0f / std::sqrt(static_cast<float>(inputs));
}

ModelWeights random_weights(const ModelConfig& config, DType dtype) {
    check(config.num_mtp_layers == 0, "random_weights: no MTP layer");
    const Shapes shapes(config, dtype);
    ModelWeights out;
    out.embedding = Shapes::view(config.vocab_size, config.hidden_size);
    out.lm_head.weight = out.embedding;
    out.final_norm = shapes.norm();
    for (int64_t i = 0; i < config.num_layers; ++i) {
        out.layers.push_back(shapes.layer(config.is_moe(i)));
    }
    out.kv_scales_static = true;
    return out;
}

}  // namespace tessera

#include "weights/export/model_walk.h"

#include <cstring>
#include <fmt/format.h>

#include "base/check.h"
#include "weights/bind/float_convert.h"
#include "weights/checkpoint/name_map.h"

namespace tessera {
namespace {

std::string stored_name(DType dtype) {
    check(dtype == DType::kFloat32 || dtype == DType::kBFloat16 || dtype == DType::kFloat16,
          "export: weights are float32, bfloat16 or float16");
    return dtype == DType::kFloat32 ? "F32" : dtype == DType::kBFloat16 ? "BF16" : "F16";
}

class Walk {
  public:
    Walk(const ModelConfig& config, TensorSink& sink) : config_(config), sink_(sink) {}

    void vector(const std::string& name, const WeightView& view) { sink_.plain(name, view, {view.cols}); }
    void matrix(const std::string& name, const WeightView& view) {
        sink_.plain(name, view, {view.rows, view.cols});
    }

    void layer(size_t index, const LayerWeights& layer) {
        const std::string prefix = layer_prefix(static_cast<int64_t>(index));
        vector(prefix + "input_layernorm.weight", layer.input_norm);
        attention(index, prefix + "self_attn.", layer.attention);
        vector(prefix + "post_attention_layernorm.weight", layer.post_attention_norm);
        if (layer.dense) {
            mlp(prefix + "mlp.", *layer.dense, {.layer = index});
        } else {
            moe(index, prefix + "mlp.", *layer.moe);
        }
    }

  private:
    void mlp(const std::string& prefix, const MlpWeights& mlp, LinearPlace place) {
        place.input = LinearInput::kMlp;
        sink_.linear(prefix + "gate_proj", mlp.gate, place);
        sink_.linear(prefix + "up_proj", mlp.up, place);
        place.input = LinearInput::kDown;
        sink_.linear(prefix + "down_proj", mlp.down, place);
    }

    void attention(size_t index, const std::string& prefix, const AttentionWeights& attention) {
        const LinearPlace input{.layer = index, .input = LinearInput::kAttention};
        sink_.linear(prefix + "q_proj", attention.q, input);
        sink_.linear(prefix + "k_proj", attention.k, input);
        sink_.linear(prefix + "v_proj", attention.v, input);
        sink_.linear(prefix + "o_proj", attention.o,
                     {.layer = index, .input = LinearInput::kAttentionOutput});
        if (config_.qk_norm) {
            vector(prefix + "q_norm.weight", attention.q_norm);
            vector(prefix + "k_norm.weight", attention.k_norm);
        }
        sink_.kv_cache(prefix, index);
    }

    void moe(size_t index, const std::string& prefix, const MoeWeights& moe) {
        matrix(prefix + "router.gate.weight", moe.router);
        if (config_.router_expert_bias) {
            vector(prefix + "expert_bias", moe.expert_bias);
        }
        for (size_t e = 0; e < moe.experts.size(); ++e) {
            mlp(fmt::format("{}experts.{}.", prefix, e), moe.experts[e], {.layer = index, .routed = true});
        }
        if (config_.num_shared_experts > 0) {
            mlp(prefix + "shared_mlp.", moe.shared, {.layer = index});
        }
    }

    const ModelConfig& config_;
    TensorSink& sink_;
};

}  // namespace

OutputTensor plain_tensor(const std::string& name, const WeightView& view, std::vector<int64_t> shape) {
    return {.name = name,
            .dtype = stored_name(view.dtype),
            .shape = std::move(shape),
            .bytes = view.rows * view.cols * dtype_size(view.dtype),
            .data = view.data};
}

void widen_row(const WeightView& weight, int64_t row, std::vector<float>& out) {
    out.resize(static_cast<size_t>(weight.cols));
    const auto* from =
        static_cast<const std::byte*>(weight.data) + row * weight.cols * dtype_size(weight.dtype);
    if (weight.dtype == DType::kFloat32) {
        std::memcpy(out.data(), from, out.size() * sizeof(float));
    } else {
        widen({from, weight.dtype, 1, weight.cols}, out.data());
    }
}

void walk_model(const ModelConfig& config, const ModelWeights& weights, TensorSink& sink) {
    Walk walk(config, sink);
    const size_t trunk = weights.layers.size();
    walk.matrix("model.embed_tokens.weight", weights.embedding);
    for (size_t i = 0; i < trunk; ++i) {
        walk.layer(i, weights.layers[i]);
    }
    walk.vector("model.norm.weight", weights.final_norm);
    if (!config.tie_word_embeddings) {
        walk.matrix("lm_head.weight", weights.lm_head.weight);
    }
    if (weights.mtp) {
        const std::string prefix = layer_prefix(static_cast<int64_t>(trunk));
        walk.vector(prefix + "enorm.weight", weights.mtp->embedding_norm);
        walk.vector(prefix + "hnorm.weight", weights.mtp->hidden_norm);
        walk.matrix(prefix + "eh_proj.weight", weights.mtp->projection.weight);
        walk.layer(trunk, weights.mtp->layer);
        walk.vector(prefix + "final_layernorm.weight", weights.mtp->final_norm);
    }
}

}  // namespace tessera

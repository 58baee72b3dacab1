#include "weights/export/fp8_tensors.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <fmt/format.h>

#include "base/check.h"
#include "weights/bind/float_convert.h"
#include "weights/checkpoint/name_map.h"
#include "weights/export/e4m3.h"

namespace tessera {
namespace {

std::string stored_name(DType dtype) {
    check(dtype == DType::kFloat32 || dtype == DType::kBFloat16 || dtype == DType::kFloat16,
          "export: weights are float32, bfloat16 or float16");
    return dtype == DType::kFloat32 ? "F32" : dtype == DType::kBFloat16 ? "BF16" : "F16";
}

// A row of the view as float32.
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

class TensorList {
  public:
    explicit TensorList(ThreadPool& pool) : pool_(pool) {}

    Result<Fp8Tensors> take() {
        return status_.ok() ? Result<Fp8Tensors>(std::move(tensors_)) : Result<Fp8Tensors>(status_);
    }

    void vector(const std::string& name, const WeightView& view) { plain(name, view, {view.cols}); }
    void matrix(const std::string& name, const WeightView& view) {
        plain(name, view, {view.rows, view.cols});
    }

    void linear(const std::string& module, const LinearWeights& linear, float input_limit) {
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
        tensors_.weights.push_back(scalar(module + ".input_scale", e4m3_scale(input_limit)));
    }

    void kv_scale(const std::string& name, float limit) {
        tensors_.kv_scales.push_back(scalar(name, e4m3_scale(limit)));
    }

  private:
    void plain(const std::string& name, const WeightView& view, std::vector<int64_t> shape) {
        tensors_.weights.push_back({.name = name,
                                    .dtype = stored_name(view.dtype),
                                    .shape = std::move(shape),
                                    .bytes = view.rows * view.cols * dtype_size(view.dtype),
                                    .data = view.data});
    }

    ThreadPool& pool_;
    Fp8Tensors tensors_;
    Status status_;  // the first error
};

struct MlpLimits {
    float input = 0;
    float down_input = 0;
};

void list_mlp(TensorList& list, const std::string& prefix, const MlpWeights& mlp, const MlpLimits& limits) {
    list.linear(prefix + "gate_proj", mlp.gate, limits.input);
    list.linear(prefix + "up_proj", mlp.up, limits.input);
    list.linear(prefix + "down_proj", mlp.down, limits.down_input);
}

void list_attention(TensorList& list, const ModelConfig& config, const std::string& prefix,
                    const AttentionWeights& attention, const LayerLimits& limits) {
    list.linear(prefix + "q_proj", attention.q, limits.attention_input);
    list.linear(prefix + "k_proj", attention.k, limits.attention_input);
    list.linear(prefix + "v_proj", attention.v, limits.attention_input);
    list.linear(prefix + "o_proj", attention.o, limits.output_input);
    if (config.qk_norm) {
        list.vector(prefix + "q_norm.weight", attention.q_norm);
        list.vector(prefix + "k_norm.weight", attention.k_norm);
    }
    list.kv_scale(prefix + "k_cache.scale", limits.key);
    list.kv_scale(prefix + "v_cache.scale", limits.value);
}

void list_moe(TensorList& list, const ModelConfig& config, const std::string& prefix, const MoeWeights& moe,
              const LayerLimits& limits) {
    list.matrix(prefix + "router.gate.weight", moe.router);
    if (config.router_expert_bias) {
        list.vector(prefix + "expert_bias", moe.expert_bias);
    }
    for (size_t e = 0; e < moe.experts.size(); ++e) {
        list_mlp(list, fmt::format("{}experts.{}.", prefix, e), moe.experts[e],
                 {limits.mlp_input, limits.expert_down_input});
    }
    if (config.num_shared_experts > 0) {
        list_mlp(list, prefix + "shared_mlp.", moe.shared, {limits.mlp_input, limits.shared_down_input});
    }
}

void list_layer(TensorList& list, const ModelConfig& config, int64_t index, const LayerWeights& layer,
                const LayerLimits& limits) {
    const std::string prefix = layer_prefix(index);
    list.vector(prefix + "input_layernorm.weight", layer.input_norm);
    list_attention(list, config, prefix + "self_attn.", layer.attention, limits);
    list.vector(prefix + "post_attention_layernorm.weight", layer.post_attention_norm);
    if (layer.dense) {
        list_mlp(list, prefix + "mlp.", *layer.dense, {limits.mlp_input, limits.shared_down_input});
    } else {
        list_moe(list, config, prefix + "mlp.", *layer.moe, limits);
    }
}

}  // namespace

Result<Fp8Tensors> fp8_tensors(const ModelConfig& config, const ModelWeights& weights,
                               const std::vector<LayerLimits>& limits, ThreadPool& pool) {
    const size_t trunk = weights.layers.size();
    check(limits.size() >= trunk + (weights.mtp ? 1 : 0), "fp8_tensors: a layer without limits");
    TensorList list(pool);
    list.matrix("model.embed_tokens.weight", weights.embedding);
    for (size_t i = 0; i < trunk; ++i) {
        list_layer(list, config, static_cast<int64_t>(i), weights.layers[i], limits[i]);
    }
    list.vector("model.norm.weight", weights.final_norm);
    if (!config.tie_word_embeddings) {
        list.matrix("lm_head.weight", weights.lm_head.weight);
    }
    if (weights.mtp) {
        const std::string prefix = layer_prefix(static_cast<int64_t>(trunk));
        list.vector(prefix + "enorm.weight", weights.mtp->embedding_norm);
        list.vector(prefix + "hnorm.weight", weights.mtp->hidden_norm);
        list.matrix(prefix + "eh_proj.weight", weights.mtp->projection.weight);
        list_layer(list, config, static_cast<int64_t>(trunk), weights.mtp->layer, limits[trunk]);
        list.vector(prefix + "final_layernorm.weight", weights.mtp->final_norm);
    }
    return list.take();
}

}  // namespace tessera

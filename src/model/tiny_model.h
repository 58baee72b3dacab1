// A hy_v3 model of a few thousand random weights, for tests: 1 dense and 2 MoE layers and an MTP layer, with
// sizes that are no multiples of the kernels' blocks.
#pragma once

#include <cmath>
#include <deque>
#include <vector>

#include "ops/common/half.h"
#include "types/model_config.h"
#include "weights/model_weights.h"

namespace tessera {

// How the routed experts are stored: as everything else, or values that e4m3 holds exactly in one of three
// forms that mean the same.
enum class TinyExperts : uint8_t { kAsOthers, kExactBFloat16, kFp8Blocks, kFp8OneScale };

struct TinyModelSpec {
    // kBFloat16, kFloat32 (the same values), or kFloat8E4M3 with static input scales (other values).
    DType dtype = DType::kBFloat16;
    // Sizes that the CUDA backend takes, dense layers alone, and so many query heads for each KV head.
    int64_t device_group = 0;
    TinyExperts experts = TinyExperts::kAsOthers;
    int64_t hidden_size = 72;
    int64_t expert_width = 24;
};

struct TinyModel {
    explicit TinyModel(const TinyModelSpec& model_spec = {}) : spec(model_spec) {
        config.model_type = "hy_v3";
        config.vocab_size = 90;
        config.hidden_size = spec.hidden_size;
        config.intermediate_size = 100;
        config.moe_intermediate_size = spec.expert_width;
        config.num_layers = 3;
        config.num_heads = 6;
        config.num_kv_heads = 2;
        config.head_dim = 16;
        config.num_experts = 5;
        config.num_experts_per_token = 2;
        config.num_shared_experts = 1;
        config.first_k_dense = 1;
        config.num_mtp_layers = 1;
        config.max_position_embeddings = 1024;
        config.rms_norm_eps = 1e-5;
        config.rope_theta = 10000;
        config.router_scaling_factor = 1.5;
        if (spec.device_group > 0) {
            use_device_sizes();
        }
        weights.embedding = tensor(config.vocab_size, config.hidden_size, 1.0f);
        weights.lm_head.weight = tensor(config.vocab_size, config.hidden_size, 0.2f);
        weights.final_norm = tensor(1, config.hidden_size, 1.0f);
        for (int64_t i = 0; i < config.num_layers; ++i) {
            weights.layers.push_back(layer(config.is_moe(i)));
        }
        if (config.num_mtp_layers == 0) {
            return;
        }
        MtpWeights mtp;
        mtp.embedding_norm = tensor(1, config.hidden_size, 1.0f);
        mtp.hidden_norm = tensor(1, config.hidden_size, 1.0f);
        mtp.final_norm = tensor(1, config.hidden_size, 1.0f);
        mtp.projection.weight = tensor(config.hidden_size, 2 * config.hidden_size, 0.1f);
        mtp.layer = layer(true);
        weights.mtp = mtp;
    }

    TinyModelSpec spec;
    ModelConfig config;
    ModelWeights weights;

  private:
    void use_device_sizes() {
        config.vocab_size = 256;
        config.hidden_size = 256;
        config.intermediate_size = 256;
        config.moe_intermediate_size = 256;
        config.head_dim = 128;
        config.num_heads = spec.device_group * config.num_kv_heads;
        config.first_k_dense = config.num_layers;
        config.num_mtp_layers = 0;
    }

    float random() {
        state = state * 6364136223846793005u + 1442695040888963407u;
        return static_cast<float>(static_cast<int64_t>(state >> 40) - (1 << 23)) * 0x1p-23f;
    }

    // [rows, cols] values in [-size, size): bfloat16 ones, stored as the spec says (FP8 is for linears only).
    WeightView tensor(int64_t rows, int64_t cols, float size) {
        const bool wide = spec.dtype == DType::kFloat32;
        std::vector<std::byte>& bytes =
            memory.emplace_back(static_cast<size_t>(rows * cols * (wide ? 4 : 2)));
        for (int64_t i = 0; i < rows * cols; ++i) {
            const uint16_t bits = f32_to_bf16(random() * size);
            if (wide) {
                reinterpret_cast<float*>(bytes.data())[i] = bf16_to_f32(bits);
            } else {
                reinterpret_cast<uint16_t*>(bytes.data())[i] = bits;
            }
        }
        return {bytes.data(), wide ? DType::kFloat32 : DType::kBFloat16, rows, cols};
    }

    LinearWeights linear(int64_t rows, int64_t cols) {
        const float size = 0.2f;
        if (spec.dtype != DType::kFloat8E4M3) {
            return {tensor(rows, cols, size), {}, {}};
        }
        std::vector<std::byte>& bytes = memory.emplace_back(static_cast<size_t>(rows * cols));
        for (std::byte& byte : bytes) {  // magnitudes up to 1.875 * 2^0
            const float value = random();
            byte = static_cast<std::byte>((static_cast<int>((value < 0 ? -value : value) * 63.0f)) |
                                          (value < 0 ? 0x80 : 0));
        }
        return {{bytes.data(), DType::kFloat8E4M3, rows, cols}, size, 0.02f};
    }

    // Magnitudes from 2^-7 to 1.875 * 2^-3. In blocks scales differ by powers of two, and codes with them.
    LinearWeights exact_linear(int64_t rows, int64_t cols) {
        constexpr float kScale = 0x1p-3f;
        const int64_t across = (cols + kFp8Block - 1) / kFp8Block;
        std::vector<std::byte>& scales = memory.emplace_back(
            static_cast<size_t>((rows + kFp8Block - 1) / kFp8Block * across) * sizeof(float));
        std::vector<std::byte>& codes = memory.emplace_back(static_cast<size_t>(rows * cols));
        std::vector<std::byte>& wide = memory.emplace_back(static_cast<size_t>(rows * cols * 2));
        for (int64_t i = 0; i < rows * cols; ++i) {
            const int64_t block = i / cols / kFp8Block * across + i % cols / kFp8Block;
            const auto up = static_cast<int>(spec.experts == TinyExperts::kFp8Blocks ? block % 3 - 1 : 0);
            const float value = random();
            const int code = 3 * 8 + static_cast<int>((value < 0 ? -value : value) * 39.0f);
            const int sign = value < 0 ? 0x80 : 0;
            codes[static_cast<size_t>(i)] = static_cast<std::byte>((code - 8 * up) | sign);
            reinterpret_cast<float*>(scales.data())[block] = std::ldexp(kScale, up);
            reinterpret_cast<uint16_t*>(wide.data())[i] =
                f32_to_bf16(e4m3_to_f32(static_cast<uint8_t>(code | sign)) * kScale);
        }
        if (spec.experts == TinyExperts::kExactBFloat16) {
            return {.weight = {wide.data(), DType::kBFloat16, rows, cols}};
        }
        return {.weight = {codes.data(), DType::kFloat8E4M3, rows, cols},
                .blocks = Fp8Blocks{reinterpret_cast<const float*>(scales.data())}};
    }

    MlpWeights expert() {
        const int64_t width = config.moe_intermediate_size;
        if (spec.experts == TinyExperts::kAsOthers) {
            return mlp(width);
        }
        return {exact_linear(width, config.hidden_size), exact_linear(width, config.hidden_size),
                exact_linear(config.hidden_size, width)};
    }

    MlpWeights mlp(int64_t width) {
        return {linear(width, config.hidden_size), linear(width, config.hidden_size),
                linear(config.hidden_size, width)};
    }

    LayerWeights layer(bool moe) {
        LayerWeights out;
        out.input_norm = tensor(1, config.hidden_size, 1.0f);
        out.post_attention_norm = tensor(1, config.hidden_size, 1.0f);
        out.attention.q = linear(config.q_width(), config.hidden_size);
        out.attention.k = linear(config.kv_width(), config.hidden_size);
        out.attention.v = linear(config.kv_width(), config.hidden_size);
        out.attention.o = linear(config.hidden_size, config.q_width());
        out.attention.q_norm = tensor(1, config.head_dim, 1.0f);
        out.attention.k_norm = tensor(1, config.head_dim, 1.0f);
        if (!moe) {
            out.dense = mlp(config.intermediate_size);
            return out;
        }
        MoeWeights experts;
        experts.router = tensor(config.num_experts, config.hidden_size, 0.3f);
        std::vector<std::byte>& bias = memory.emplace_back(static_cast<size_t>(config.num_experts * 4));
        for (int64_t e = 0; e < config.num_experts; ++e) {
            reinterpret_cast<float*>(bias.data())[e] = random() * 0.1f;
        }
        experts.expert_bias = {bias.data(), DType::kFloat32, 1, config.num_experts};
        for (int64_t e = 0; e < config.num_experts; ++e) {
            experts.experts.push_back(expert());
        }
        experts.shared = mlp(config.shared_width());
        out.moe = experts;
        return out;
    }

    uint64_t state = 1;
    std::deque<std::vector<std::byte>> memory;  // stays in place as it grows
};

}  // namespace tessera

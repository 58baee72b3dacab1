#include "model/cuda/device_weights.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <memory>
#include <optional>
#include <thread>

#include "device/cuda/blocking_copy.h"
#include "device/cuda/cuda_check.h"
#include "model/cuda/random_fill.h"
#include "model/cuda/random_weights.h"
#include "model/device_form/grouped_experts.h"
#include "model/device_form/router_parts.h"
#include "model/weight_value.h"
#include "ops/common/half.h"
#include "ops/moe/w4_layout.h"
#include "ops/moe/w8_layout.h"
#include "weights/fp8_blocks.h"

namespace tessera {
namespace {

constexpr int64_t kAlign = 256;
constexpr int kThreadsMax = 32;

enum class Group : uint8_t { kEmbedding, kAttention, kMlp, kExperts, kSmall };
constexpr std::array<std::string_view, 5> kGroupNames = {
    "embedding and head", "attention", "dense and shared MLPs", "experts", "norms, routers and scales"};

// Converts elements [0, n) to bfloat16. `scale` multiplies e4m3 values.
void to_bf16(const WeightView& view, float scale, std::vector<uint16_t>& out) {
    const auto n = static_cast<size_t>(view.rows * view.cols);
    out.resize(n);
    const bool scaled = view.dtype == DType::kFloat8E4M3;
    for (size_t i = 0; i < n; ++i) {
        const float value = weight_value(view, i);
        out[i] = f32_to_bf16(scaled ? value * scale : value);
    }
}

// Lays the device memory out and fills it. The binding below runs twice with it: first to learn the sizes,
// then with memory.
class Uploader {
  public:
    explicit Uploader(const UploadOptions& options) : options_(options) {}

    const UploadOptions& options() const { return options_; }
    // Made when they are first wanted.
    ThreadPool& threads() {
        if (threads_ == nullptr) {
            const auto cores = static_cast<int>(std::thread::hardware_concurrency());
            threads_ = std::make_unique<ThreadPool>(std::clamp(cores, 1, kThreadsMax));
        }
        return *threads_;
    }

    Status allocate(MemoryBudget& budget) {
        for (size_t group = 0; group < sizes_.size(); ++group) {
            Result<DeviceBuffer> buffer =
                DeviceBuffer::allocate(budget, MemoryCategory::kWeights, kGroupNames[group], sizes_[group]);
            if (!buffer.ok()) {
                return buffer.status();
            }
            memory_.push_back(buffer.take());
            sizes_[group] = 0;
        }
        return {};
    }
    std::vector<DeviceBuffer> take_memory() { return std::move(memory_); }

    std::byte* take(Group group, int64_t bytes) {
        int64_t& size = sizes_[static_cast<size_t>(group)];
        std::byte* place = memory_.empty() ? nullptr : memory_[static_cast<size_t>(group)].data() + size;
        size += (bytes + kAlign - 1) / kAlign * kAlign;
        return place;
    }
    void copy(std::byte* to, const void* from, int64_t bytes) const {
        if (to != nullptr) {
            copy_blocking(to, from, bytes);
        }
    }
    // Draws a view's elements instead of copying them. A vector is a norm's weight: ones.
    void draw(std::byte* to, const WeightView& view, DType dtype, float deviation) {
        if (to == nullptr) {
            return;
        }
        const bool norm = view.rows == 1;
        random_fill_cuda(nullptr, {.to = to,
                                   .count = view.rows * view.cols,
                                   .dtype = dtype,
                                   .seed = *options_.random_seed + (++drawn_ << 40),
                                   .mean = norm ? 1.0f : 0.0f,
                                   .deviation = norm ? 0.0f : deviation});
    }
    // Writes the view as bfloat16 and returns the place after it.
    std::byte* copy_bf16(std::byte* to, const WeightView& view, float scale) {
        if (to == nullptr) {
            return nullptr;
        }
        const int64_t n = view.rows * view.cols;
        if (view.dtype == DType::kBFloat16) {
            copy(to, view.data, 2 * n);
        } else {
            to_bf16(view, scale, converted_);
            copy(to, converted_.data(), 2 * n);
        }
        return to + 2 * n;
    }

    const __nv_bfloat16* vector(Group group, const WeightView& view) {
        std::byte* place = take(group, view.rows * view.cols * 2);
        if (options_.random_seed.has_value()) {
            draw(place, view, DType::kBFloat16,
                 group == Group::kEmbedding ? 1.0f : random_deviation(DType::kBFloat16, view.cols));
        } else {
            copy_bf16(place, view, 1);
        }
        return reinterpret_cast<const __nv_bfloat16*>(place);
    }
    void router(const WeightView& view, DeviceLayer& layer) {
        if (options_.random_seed.has_value()) {
            layer.router_high = vector(Group::kSmall, view);
            return;
        }
        const RouterParts parts = router_parts(view);
        layer.router_high = small<__nv_bfloat16>(parts.high);
        layer.router_low = parts.low.empty() ? nullptr : small<__nv_bfloat16>(parts.low);
    }
    const float* floats(const std::vector<float>& values) { return small<float>(values); }

    bool fp8(const LinearWeights& linear) const {
        return linear.weight.dtype == DType::kFloat8E4M3 && linear.input_scale.has_value() &&
               !options_.weight_only;
    }
    // The linear's elements, as they are in e4m3 or else as bfloat16; returns the place after them.
    std::byte* fill(std::byte* to, const LinearWeights& linear, bool as_fp8) {
        const int64_t n = linear.weight.rows * linear.weight.cols;
        if (to != nullptr && options_.random_seed.has_value()) {
            const DType dtype = as_fp8 ? DType::kFloat8E4M3 : DType::kBFloat16;
            draw(to, linear.weight, dtype, random_deviation(dtype, linear.weight.cols));
            return to + n * dtype_size(dtype);
        }
        if (linear.int4 || linear.blocks) {
            if (to == nullptr) {
                return nullptr;
            }
            converted_.resize(static_cast<size_t>(n));
            if (linear.int4) {
                int4_to_bf16(linear, converted_);
            } else {
                fp8_blocks_to_bf16(linear, converted_.data());
            }
            copy(to, converted_.data(), 2 * n);
            return to + 2 * n;
        }
        if (as_fp8) {
            copy(to, linear.weight.data, n);
            return to == nullptr ? nullptr : to + n;
        }
        return copy_bf16(to, linear.weight, linear.weight_scale.value_or(1.0f));
    }

    // The linears stacked, one above the other. They are multiplied with one input: where their static scales
    // differ the largest is used, which loses nothing to saturation.
    DeviceMatrix matrix(Group group, const std::vector<const LinearWeights*>& parts, bool may_be_fp8 = true) {
        DeviceMatrix out;
        out.inputs = parts.front()->weight.cols;
        const bool as_fp8 = may_be_fp8 && std::all_of(parts.begin(), parts.end(),
                                                      [&](const auto* part) { return fp8(*part); });
        out.dtype = as_fp8 ? DType::kFloat8E4M3 : DType::kBFloat16;
        out.input_scale = as_fp8 ? 0.0f : 1.0f;
        std::vector<float> columns;
        for (const LinearWeights* part : parts) {
            out.outputs += part->weight.rows;
            if (as_fp8) {
                out.input_scale = std::max(out.input_scale, *part->input_scale);
                columns.resize(static_cast<size_t>(out.outputs), part->weight_scale.value_or(1.0f));
            }
        }
        std::byte* place = take(group, out.outputs * out.inputs * dtype_size(out.dtype));
        out.data = place;
        for (const LinearWeights* part : parts) {
            place = fill(place, *part, as_fp8);
        }
        if (as_fp8 && parts.size() == 1) {
            out.weight_scale = columns.front();
        } else if (as_fp8) {
            out.column_scale = floats(columns);
            out.row_scale =
                floats(std::vector<float>(static_cast<size_t>(options_.tokens_max), out.input_scale));
        }
        return out;
    }

  private:
    template <typename To, typename From>
    const To* small(const std::vector<From>& values) {
        static_assert(sizeof(To) == sizeof(From));
        const auto bytes = static_cast<int64_t>(values.size() * sizeof(From));
        std::byte* place = take(Group::kSmall, bytes);
        copy(place, values.data(), bytes);
        return reinterpret_cast<const To*>(place);
    }

    const UploadOptions options_;
    std::array<int64_t, kGroupNames.size()> sizes_{};
    std::vector<DeviceBuffer> memory_;
    std::vector<uint16_t> converted_;
    std::unique_ptr<ThreadPool> threads_;
    uint64_t drawn_ = 0;
};

bool all_fp8(const Uploader& up, const MlpWeights& mlp) {
    return up.fp8(mlp.gate) && up.fp8(mlp.up) && up.fp8(mlp.down);
}

float gate_up_input(const MlpWeights& mlp) {
    return std::max(*mlp.gate.input_scale, *mlp.up.input_scale);
}

// The shared expert's or the dense layer's part of `t`.
void bind_shared(const MlpWeights& mlp, Uploader& up, MoeCudaTensors& t) {
    const DType dtype = t.grouped() ? DType::kBFloat16 : t.dtype;
    const bool as_fp8 = dtype == DType::kFloat8E4M3;
    t.shared_width = mlp.gate.weight.rows;
    const int64_t elements = t.shared_width * t.hidden * dtype_size(dtype);
    std::byte* place = up.take(Group::kMlp, 2 * elements);
    t.shared_gate_up = place;
    up.fill(up.fill(place, mlp.gate, as_fp8), mlp.up, as_fp8);
    place = up.take(Group::kMlp, elements);
    t.shared_down = place;
    up.fill(place, mlp.down, as_fp8);
    if (as_fp8) {
        t.shared_gate_up_scale =
            up.floats({mlp.gate.weight_scale.value_or(1.0f), mlp.up.weight_scale.value_or(1.0f)});
        t.shared_down_scale = up.floats({mlp.down.weight_scale.value_or(1.0f)});
        t.shared_down_input_scale = up.floats({*mlp.down.input_scale});
        t.shared_input_scale = gate_up_input(mlp);
    }
}

void bind_experts(const std::vector<MlpWeights>& experts, Uploader& up, MoeCudaTensors& t) {
    const bool as_fp8 = t.dtype == DType::kFloat8E4M3;
    t.experts = static_cast<int64_t>(experts.size());
    t.width = experts.front().gate.weight.rows;
    const int64_t elements = t.experts * t.width * t.hidden * dtype_size(t.dtype);
    std::byte* gate_up = up.take(Group::kExperts, 2 * elements);
    std::byte* down = up.take(Group::kExperts, elements);
    t.gate_up = gate_up;
    t.down = down;
    std::vector<float> gate_up_scales;
    std::vector<float> down_scales;
    std::vector<float> down_inputs;
    float input = 0;
    for (const MlpWeights& expert : experts) {
        gate_up = up.fill(up.fill(gate_up, expert.gate, as_fp8), expert.up, as_fp8);
        down = up.fill(down, expert.down, as_fp8);
        gate_up_scales.push_back(expert.gate.weight_scale.value_or(1.0f));
        gate_up_scales.push_back(expert.up.weight_scale.value_or(1.0f));
        down_scales.push_back(expert.down.weight_scale.value_or(1.0f));
        down_inputs.push_back(expert.down.input_scale.value_or(1.0f));
        input = as_fp8 ? std::max(input, gate_up_input(expert)) : 1.0f;
    }
    if (as_fp8) {
        t.gate_up_scale = up.floats(gate_up_scales);
        t.down_scale = up.floats(down_scales);
        t.down_input_scale = up.floats(down_inputs);
        t.input_scale = input;
    }
}

// Grouped, as t.dtype and t.fp8_blocks say.
void bind_grouped_experts(const std::vector<MlpWeights>& experts, Uploader& up, MoeCudaTensors& t) {
    t.experts = static_cast<int64_t>(experts.size());
    t.width = experts.front().gate.weight.rows;
    const int64_t gate_up_bytes = (t.fp8_blocks ? w8_gate_up_bytes : w4_gate_up_bytes)(t.hidden, t.width);
    const int64_t down_bytes = (t.fp8_blocks ? w8_down_bytes : w4_down_bytes)(t.hidden, t.width);
    std::byte* gate_up = up.take(Group::kExperts, t.experts * gate_up_bytes);
    std::byte* down = up.take(Group::kExperts, t.experts * down_bytes);
    t.gate_up = gate_up;
    t.down = down;
    if (gate_up == nullptr) {
        return;
    }
    PackedExpert packed;
    for (const MlpWeights& expert : experts) {
        (t.fp8_blocks ? pack_block_expert : pack_int4_expert)(expert, up.threads(), packed);
        up.copy(gate_up, packed.gate_up.data(), gate_up_bytes);
        up.copy(down, packed.down.data(), down_bytes);
        gate_up += gate_up_bytes;
        down += down_bytes;
    }
}

// The experts of a layer share one dtype: grouped or e4m3 when all of them can have it. Beside grouped ones
// the shared expert is bfloat16.
MoeCudaTensors bind_mlp(const ModelConfig& config, const LayerWeights& weights, Uploader& up) {
    MoeCudaTensors t;
    t.hidden = config.hidden_size;
    if (weights.dense.has_value()) {
        t.dtype = all_fp8(up, *weights.dense) ? DType::kFloat8E4M3 : DType::kBFloat16;
        bind_shared(*weights.dense, up, t);
        return t;
    }
    const MoeWeights& moe = *weights.moe;
    const bool shared = config.num_shared_experts > 0;
    const bool quantises = !up.options().weight_only;
    t.fp8_blocks = quantises && block_experts_fit(moe.experts);
    if (t.fp8_blocks || (quantises && int4_experts_fit(moe.experts))) {
        t.dtype = t.fp8_blocks ? DType::kFloat8E4M3 : DType::kInt4;
        bind_grouped_experts(moe.experts, up, t);
    } else {
        const bool shared_fp8 = !shared || all_fp8(up, moe.shared);
        const bool as_fp8 = shared_fp8 && std::ranges::all_of(moe.experts, [&](const MlpWeights& expert) {
                                return all_fp8(up, expert);
                            });
        t.dtype = as_fp8 ? DType::kFloat8E4M3 : DType::kBFloat16;
        bind_experts(moe.experts, up, t);
    }
    if (shared) {
        bind_shared(moe.shared, up, t);
    }
    return t;
}

DeviceLayer bind_layer(const ModelConfig& config, const LayerWeights& weights, Uploader& up) {
    DeviceLayer layer;
    layer.input_norm = up.vector(Group::kSmall, weights.input_norm);
    layer.post_attention_norm = up.vector(Group::kSmall, weights.post_attention_norm);
    const AttentionWeights& attention = weights.attention;
    if (config.qk_norm) {
        layer.q_norm = up.vector(Group::kSmall, attention.q_norm);
        layer.k_norm = up.vector(Group::kSmall, attention.k_norm);
    }
    layer.qkv = up.matrix(Group::kAttention, {&attention.q, &attention.k, &attention.v});
    layer.o = up.matrix(Group::kAttention, {&attention.o});
    layer.k_scale = attention.k_scale;
    layer.v_scale = attention.v_scale;
    layer.is_moe = weights.moe.has_value();
    if (layer.is_moe) {
        up.router(weights.moe->router, layer);
        if (config.router_expert_bias) {
            const auto n = static_cast<size_t>(config.num_experts);
            std::vector<float> bias(n);
            if (weights.moe->expert_bias.data != nullptr) {
                std::memcpy(bias.data(), weights.moe->expert_bias.data, n * 4);
            }
            layer.expert_bias = up.floats(bias);
        }
    }
    const MoeCudaTensors tensors = bind_mlp(config, weights, up);
    if ((layer.is_moe ? tensors.gate_up : tensors.shared_gate_up) != nullptr) {
        layer.mlp = moe_cuda_bind(tensors);
    }
    return layer;
}

DeviceWeights bind_model(const ModelConfig& config, const ModelWeights& weights, Uploader& up) {
    DeviceWeights out;
    out.embedding = up.vector(Group::kEmbedding, weights.embedding);
    out.lm_head = up.matrix(Group::kEmbedding, {&weights.lm_head}, false);
    out.final_norm = up.vector(Group::kSmall, weights.final_norm);
    for (const LayerWeights& layer : weights.layers) {
        out.layers.push_back(bind_layer(config, layer, up));
    }
    if (weights.mtp.has_value()) {
        const MtpWeights& mtp = *weights.mtp;
        out.mtp.embedding_norm = up.vector(Group::kSmall, mtp.embedding_norm);
        out.mtp.hidden_norm = up.vector(Group::kSmall, mtp.hidden_norm);
        out.mtp.final_norm = up.vector(Group::kSmall, mtp.final_norm);
        out.mtp.projection = up.matrix(Group::kMlp, {&mtp.projection}, false);
        out.mtp.layer = bind_layer(config, mtp.layer, up);
    }
    return out;
}

}  // namespace

int64_t DeviceWeights::bytes() const {
    int64_t sum = 0;
    for (const DeviceBuffer& buffer : memory) {
        sum += buffer.bytes();
    }
    return sum;
}

Result<DeviceWeights> upload_weights(const ModelConfig& config, const ModelWeights& weights,
                                     const UploadOptions& options, MemoryBudget& budget) {
    Uploader uploader(options);
    bind_model(config, weights, uploader);
    if (Status status = uploader.allocate(budget); !status.ok()) {
        return status;
    }
    DeviceWeights out = bind_model(config, weights, uploader);
    cuda_check(cudaDeviceSynchronize());
    out.memory = uploader.take_memory();
    return out;
}

}  // namespace tessera

#include "weights/bind/binder.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <fmt/format.h>
#include <initializer_list>

#include "base/log.h"
#include "weights/bind/float_convert.h"
#include "weights/checkpoint/name_map.h"
#include "weights/fp8_blocks.h"

namespace tessera {
namespace {

using Shape = std::vector<int64_t>;

// Finds and checks single tensors. The first failure stays; after it every call returns something empty, so
// that the code that walks the model needs no branches.
class Binder {
  public:
    Binder(const ModelConfig& config, const QuantConfig& quant, Checkpoint& checkpoint)
        : config_(config), quant_(quant), checkpoint_(checkpoint) {}

    bool ok() const { return status_.ok(); }
    const Status& status() const { return status_; }
    const ModelConfig& config() const { return config_; }
    const QuantConfig& quant() const { return quant_; }
    bool has(const std::string& name) { return checkpoint_.find(name) != nullptr; }

    WeightView vector(const std::string& name, int64_t size) { return plain(name, {size}); }
    WeightView matrix(const std::string& name, int64_t rows, int64_t cols) {
        return plain(name, {rows, cols});
    }
    LinearWeights linear(const std::string& module, int64_t rows, int64_t cols);
    // A routed expert's: int4 where the checkpoint's form has such a tensor, blocks of e4m3 where activations
    // are dynamic, else as linear().
    LinearWeights expert_linear(const std::string& module, int64_t rows, int64_t cols);
    // [size], widened to float32 where it is stored smaller.
    WeightView float_vector(const std::string& name, int64_t size) { return widened(plain(name, {size})); }
    std::optional<float> scalar(const std::string& name);
    // [count, rows, cols] fused; unquantised only.
    CheckpointTensor* fused(const std::string& name, const Shape& shape);

    void fail(Status status) {
        if (status_.ok()) {
            status_ = std::move(status);
        }
    }
    // Fails on the first tensor that no one has asked for.
    void check_all_used();

  private:
    CheckpointTensor* take(const std::string& name, const Shape& shape);
    CheckpointTensor* take(const std::string& name, const Shape& shape, std::string_view dtype);
    const CheckpointTensor* fp8_tensor(const std::string& module, int64_t rows, int64_t cols);
    bool has_blocks(const std::string& module);
    std::string block_scale_name(const std::string& module) const {
        return module + (quant_.fp8_blocks ? ".weight_scale_inv" : ".weight_scale");
    }
    LinearWeights block_linear(const std::string& module, int64_t rows, int64_t cols);
    const float* block_scales(const std::string& module, int64_t rows, int64_t cols);
    LinearWeights int4(const std::string& codes, const Int4Form& form, int64_t rows, int64_t cols);
    const void* int4_scales(const std::string& name, const Shape& shape);
    void check_zeros(const std::string& name, const Shape& shape);
    void check_stated_shape(const std::string& name, int64_t rows, int64_t cols);
    // Scales that the product does not need: by themselves they may be missing or anything finite.
    void pass_over(const std::string& name);
    WeightView plain(const std::string& name, const Shape& shape);
    WeightView widened(const WeightView& view);  // to float32
    std::optional<DType> dtype_of(const CheckpointTensor& tensor);
    void fail_tensor(const CheckpointTensor& tensor, std::string_view what) {
        fail(invalid_argument(
            fmt::format("{}: tensor {} {}", checkpoint_.path(tensor), tensor.entry.name, what)));
    }

    const ModelConfig& config_;
    const QuantConfig& quant_;
    Checkpoint& checkpoint_;
    Status status_;
    std::optional<Int4Layout> packed_words_;  // of a compressed-tensors checkpoint
};

CheckpointTensor* Binder::take(const std::string& name, const Shape& shape) {
    if (!ok()) {
        return nullptr;
    }
    CheckpointTensor* tensor = checkpoint_.find(name);
    if (tensor == nullptr) {
        const bool mtp = name.starts_with(layer_prefix(config_.num_layers));
        fail(invalid_argument(fmt::format(
            "{}: tensor {} is missing; config.json makes it {}{}", checkpoint_.folder(), name,
            shape_text(shape),
            mtp ? " (a checkpoint without its MTP layer needs num_nextn_predict_layers 0 in config.json)"
                : "")));
        return nullptr;
    }
    if (tensor->entry.shape != shape) {
        fail_tensor(*tensor, fmt::format("has shape {}; config.json makes it {}",
                                         shape_text(tensor->entry.shape), shape_text(shape)));
        return nullptr;
    }
    tensor->used = true;
    return tensor;
}

CheckpointTensor* Binder::take(const std::string& name, const Shape& shape, std::string_view dtype) {
    CheckpointTensor* tensor = take(name, shape);
    if (tensor != nullptr && tensor->entry.dtype != dtype) {
        fail_tensor(*tensor, fmt::format("is of type {}; it must be {}", tensor->entry.dtype, dtype));
        return nullptr;
    }
    return tensor;
}

std::optional<DType> Binder::dtype_of(const CheckpointTensor& tensor) {
    const std::optional<DType> dtype = weight_dtype(tensor.entry.dtype);
    if (!dtype) {
        fail_tensor(tensor,
                    fmt::format("is of type {}; known are BF16, F16, F32 and F8_E4M3", tensor.entry.dtype));
    }
    return dtype;
}

WeightView Binder::plain(const std::string& name, const Shape& shape) {
    const CheckpointTensor* tensor = take(name, shape);
    const std::optional<DType> dtype = tensor == nullptr ? std::nullopt : dtype_of(*tensor);
    if (!dtype) {
        return {};
    }
    if (*dtype == DType::kFloat8E4M3) {
        fail_tensor(*tensor, quant_.fp8 ? "is F8_E4M3, but the FP8 format keeps this tensor unquantised"
                                        : "is F8_E4M3, but config.json has no quantization_config");
        return {};
    }
    return {tensor->data, *dtype, shape.size() == 1 ? 1 : shape[0], shape.back()};
}

LinearWeights Binder::linear(const std::string& module, int64_t rows, int64_t cols) {
    if (has_blocks(module)) {
        // Activations are not quantised here: all but the experts is computed in bfloat16.
        const LinearWeights blocks = block_linear(module, rows, cols);
        if (!ok()) {
            return {};
        }
        std::byte* wide = checkpoint_.allocate(static_cast<size_t>(rows * cols) * 2);
        fp8_blocks_to_bf16(blocks, reinterpret_cast<uint16_t*>(wide));
        return {.weight = {wide, DType::kBFloat16, rows, cols}};
    }
    if (!quant_.quantises(module)) {
        return {.weight = plain(module + ".weight", {rows, cols})};
    }
    const CheckpointTensor* tensor = fp8_tensor(module, rows, cols);
    if (tensor == nullptr) {
        return {};
    }
    LinearWeights linear;
    linear.weight = {tensor->data, DType::kFloat8E4M3, rows, cols};
    linear.weight_scale = scalar(module + ".weight_scale");
    linear.input_scale = scalar(module + ".input_scale");
    return linear;
}

const CheckpointTensor* Binder::fp8_tensor(const std::string& module, int64_t rows, int64_t cols) {
    const CheckpointTensor* tensor = take(module + ".weight", {rows, cols});
    if (tensor != nullptr && tensor->entry.dtype != "F8_E4M3") {
        const std::string why =
            quant_.quantises(module)
                ? fmt::format("quantization_config makes it F8_E4M3 (ignored_layers does not list {})",
                              module)
                : "the scales beside it make it F8_E4M3";
        fail_tensor(*tensor, fmt::format("is {}, but {}", tensor->entry.dtype, why));
        return nullptr;
    }
    return tensor;
}

// Whether the module is e4m3 without a static scale for its input: what the format makes it, or what its
// scales do (eh_proj; projections beside int4 experts).
bool Binder::has_blocks(const std::string& module) {
    return (quant_.dynamic_inputs || quant_.fp8_blocks) &&
           (quant_.quantises(module) || has(block_scale_name(module)));
}

LinearWeights Binder::block_linear(const std::string& module, int64_t rows, int64_t cols) {
    const CheckpointTensor* tensor = fp8_tensor(module, rows, cols);
    const float* scales = block_scales(module, rows, cols);
    pass_over(module + ".input_scale");
    if (tensor == nullptr || scales == nullptr) {
        return {};
    }
    return {.weight = {tensor->data, DType::kFloat8E4M3, rows, cols}, .blocks = Fp8Blocks{scales}};
}

// Not so large that e4m3's largest value times it is no bfloat16.
bool is_scale(float value) {
    return value > 0 && value <= 3.3895e38F / 448;
}
constexpr std::string_view kScaleMust = "a scale must be positive and finite, and so must 448 times it be";

// [ceil(rows / 128), ceil(cols / 128)]; all the same where the tensor has one scale.
const float* Binder::block_scales(const std::string& module, int64_t rows, int64_t cols) {
    const Shape shape{(rows + kFp8Block - 1) / kFp8Block, (cols + kFp8Block - 1) / kFp8Block};
    const int64_t count = shape[0] * shape[1];
    const std::string name = block_scale_name(module);
    if (!quant_.fp8_blocks) {
        const std::optional<float> scale = scalar(name);
        if (!scale) {
            return nullptr;
        }
        auto* copies =
            reinterpret_cast<float*>(checkpoint_.allocate(static_cast<size_t>(count) * sizeof(float)));
        std::fill_n(copies, count, *scale);
        return copies;
    }
    const CheckpointTensor* tensor = checkpoint_.find(name);
    if (tensor == nullptr && has(module + ".weight_scale")) {
        fail(invalid_argument(
            fmt::format("{}: tensor {} is missing, but {}.weight_scale is there; with one scale "
                        "a tensor config.json must have no weight_block_size",
                        checkpoint_.folder(), name, module)));
        return nullptr;
    }
    if (tensor != nullptr && tensor->entry.dtype != "F32" && tensor->entry.dtype != "BF16" &&
        tensor->entry.dtype != "F16") {
        fail_tensor(*tensor,
                    fmt::format("is of type {}; scales must be F32, BF16 or F16", tensor->entry.dtype));
        return nullptr;
    }
    const auto* scales = static_cast<const float*>(widened(plain(name, shape)).data);
    for (int64_t i = 0; scales != nullptr && i < count; ++i) {
        if (!is_scale(scales[i])) {
            fail_tensor(*tensor, fmt::format("is {} at element {}; {}", scales[i], i, kScaleMust));
            return nullptr;
        }
    }
    return scales;
}

// Whether packed words hold codes + 8 or two's complement depends on who wrote them. Codes gather around
// zero: the reading with the smaller magnitudes is the right one, by far (2 against 6 for a bell of weights).
Int4Layout packed_word_layout(const CheckpointTensor& tensor) {
    int64_t offset = 0;
    int64_t complement = 0;
    for (uint64_t i = 0; i < std::min<uint64_t>(tensor.entry.bytes, 1 << 16); ++i) {
        for (const int shift : {0, 4}) {
            const int code = std::to_integer<int>(tensor.data[i]) >> shift & 15;
            offset += std::abs(code - 8);
            complement += code < 8 ? code : 16 - code;
        }
    }
    return offset <= complement ? Int4Layout::kOffsetBytes : Int4Layout::kBytes;
}

LinearWeights Binder::int4(const std::string& codes, const Int4Form& form, int64_t rows, int64_t cols) {
    CheckpointTensor* tensor = checkpoint_.find(codes);
    if (!ok() || tensor == nullptr) {
        return {};
    }
    tensor->used = true;
    if (cols % kInt4Group != 0 || rows % 8 != 0) {
        fail_tensor(*tensor,
                    fmt::format("is int4 with {} inputs and {} outputs; inputs must be a multiple of "
                                "{}, the size of a group, and outputs of 8",
                                cols, rows, kInt4Group));
        return {};
    }
    return {.weight = {tensor->data, DType::kInt4, rows, cols}, .int4 = form};
}

constexpr uint16_t kBFloat16Infinity = 0x7F80;

const void* Binder::int4_scales(const std::string& name, const Shape& shape) {
    const CheckpointTensor* tensor = take(name, shape, "BF16");
    if (tensor == nullptr) {
        return nullptr;
    }
    for (int64_t i = 0; i < static_cast<int64_t>(tensor->entry.bytes) / 2; ++i) {
        uint16_t bits = 0;
        std::memcpy(&bits, tensor->data + 2 * i, sizeof(bits));
        if (bits >=
            kBFloat16Infinity) {  // NaN, infinity, or a sign; a group of zeros may have the scale zero
            fail_tensor(*tensor, fmt::format("has a scale that is negative or not finite, at element {}", i));
            return nullptr;
        }
    }
    return tensor->data;
}

void Binder::check_zeros(const std::string& name, const Shape& shape) {
    const CheckpointTensor* tensor = take(name, shape, "I32");
    if (tensor != nullptr && !std::all_of(tensor->data, tensor->data + tensor->entry.bytes,
                                          [](std::byte b) { return b == std::byte{0x77}; })) {
        fail_tensor(*tensor, "has zero points other than 8; only symmetric groups are supported");
    }
}

void Binder::check_stated_shape(const std::string& name, int64_t rows, int64_t cols) {
    const CheckpointTensor* tensor = take(name, {2}, "I64");
    if (tensor == nullptr) {
        return;
    }
    std::array<int64_t, 2> stated{};
    std::memcpy(stated.data(), tensor->data, sizeof(stated));
    if (stated != std::array{rows, cols}) {
        fail_tensor(*tensor, fmt::format("is {}; config.json makes it {}", shape_text(stated),
                                         shape_text(Shape{rows, cols})));
    }
}

void Binder::pass_over(const std::string& name) {
    if (CheckpointTensor* tensor = checkpoint_.find(name)) {
        tensor->used = true;
    }
}

LinearWeights Binder::expert_linear(const std::string& module, int64_t rows, int64_t cols) {
    const int64_t groups = cols / kInt4Group;
    const auto stored = [&](const std::string& name, const Shape& shape, std::string_view dtype) {
        const CheckpointTensor* tensor = checkpoint_.find(name);
        return tensor != nullptr && (dtype != "U8" || tensor->entry.dtype == dtype) &&
               take(name, shape, dtype) != nullptr;
    };
    if (quant_.int4 == Int4Checkpoint::kGptq && stored(module + ".qweight", {cols / 8, rows}, "I32")) {
        check_zeros(module + ".qzeros", {groups, rows / 8});
        const void* scales = int4_scales(module + ".scales", {groups, rows});
        return int4(module + ".qweight", {Int4Layout::kWordsDown, scales}, rows, cols);
    }
    if (quant_.int4 == Int4Checkpoint::kTrtLlm && stored(module + ".qweight", {rows, cols / 2}, "I8")) {
        pass_over(module + ".weight_scale");
        pass_over(module + ".input_scale");
        const void* scales = int4_scales(module + ".weight_scale.int4", {rows, groups});
        return int4(module + ".qweight", {Int4Layout::kBytes, scales}, rows, cols);
    }
    if (quant_.int4 == Int4Checkpoint::kCompressedTensors &&
        stored(module + ".weight_packed", {rows, cols / 8}, "I32")) {
        check_stated_shape(module + ".weight_shape", rows, cols);
        const void* scales = int4_scales(module + ".weight_scale", {rows, groups});
        if (ok() && !packed_words_) {
            packed_words_ = packed_word_layout(*checkpoint_.find(module + ".weight_packed"));
        }
        return int4(module + ".weight_packed", {packed_words_.value_or(Int4Layout::kBytes), scales}, rows,
                    cols);
    }
    if (quant_.int4 == Int4Checkpoint::kModelOpt && stored(module + ".weight", {rows / 2, cols}, "U8")) {
        pass_over(module + ".weight_scale_2");
        pass_over(module + ".input_scale");
        const void* scales = int4_scales(module + ".weight_scale", {rows, groups});
        return int4(module + ".weight", {Int4Layout::kRowPairs, scales}, rows, cols);
    }
    if (quant_.dynamic_inputs && has_blocks(module)) {
        return block_linear(module, rows, cols);
    }
    return linear(module, rows, cols);
}

std::optional<float> Binder::scalar(const std::string& name) {
    if (!ok()) {
        return std::nullopt;
    }
    CheckpointTensor* tensor = checkpoint_.find(name);
    if (tensor == nullptr) {
        const bool blocks = name.ends_with(".weight_scale") && has(name + "_inv");
        fail(invalid_argument(fmt::format(
            "{}: tensor {} is missing; the FP8 format needs it (a float32 scalar){}", checkpoint_.folder(),
            name,
            blocks ? fmt::format(", but {}_inv is there, which needs weight_block_size [128, 128]", name)
                   : "")));
        return std::nullopt;
    }
    const Shape& shape = tensor->entry.shape;
    if (tensor->entry.dtype != "F32" || !(shape.empty() || shape == Shape{1})) {
        fail_tensor(*tensor, fmt::format("is {} {}; a scale must be F32 of shape [] or [1]",
                                         tensor->entry.dtype, shape_text(shape)));
        return std::nullopt;
    }
    float value = 0;
    std::memcpy(&value, tensor->data, sizeof(value));
    if (!is_scale(value)) {
        fail_tensor(*tensor, fmt::format("is {}; {}", value, kScaleMust));
        return std::nullopt;
    }
    tensor->used = true;
    return value;
}

WeightView Binder::widened(const WeightView& view) {
    if (view.data == nullptr || view.dtype == DType::kFloat32) {
        return view;
    }
    const auto bytes = static_cast<size_t>(view.rows * view.cols) * sizeof(float);
    auto* wide = reinterpret_cast<float*>(checkpoint_.allocate(bytes));
    widen(view, wide);
    return {wide, DType::kFloat32, view.rows, view.cols};
}

CheckpointTensor* Binder::fused(const std::string& name, const Shape& shape) {
    CheckpointTensor* tensor = take(name, shape);
    const std::optional<DType> dtype = tensor == nullptr ? std::nullopt : dtype_of(*tensor);
    if (!dtype) {
        return nullptr;
    }
    if (*dtype == DType::kFloat8E4M3 || quant_.fp8) {
        fail(unimplemented(
            fmt::format("{}: tensor {}: fused experts in an FP8 checkpoint are not implemented; store "
                        "them one tensor an expert",
                        checkpoint_.path(*tensor), tensor->entry.name)));
        return nullptr;
    }
    return tensor;
}

void Binder::check_all_used() {
    for (const auto& [name, tensor] : checkpoint_.sorted()) {
        if (!ok()) {
            return;
        }
        if (!tensor->used && !is_ignored_tensor(name, config_.num_layers)) {
            fail_tensor(*tensor, "is unexpected: no part of the model that config.json describes takes it");
        }
    }
}

// linear: how one of the three is bound.
MlpWeights bind_mlp(Binder& binder, const std::string& prefix, int64_t width,
                    LinearWeights (Binder::*linear)(const std::string&, int64_t, int64_t) = &Binder::linear) {
    const int64_t hidden = binder.config().hidden_size;
    MlpWeights mlp;
    mlp.gate = (binder.*linear)(prefix + "gate_proj", width, hidden);
    mlp.up = (binder.*linear)(prefix + "up_proj", width, hidden);
    mlp.down = (binder.*linear)(prefix + "down_proj", hidden, width);
    return mlp;
}

MlpWeights bind_expert(Binder& binder, const std::string& prefix) {
    return bind_mlp(binder, prefix, binder.config().moe_intermediate_size, &Binder::expert_linear);
}

// Rows [first, first + rows) of a fused tensor seen as one tall matrix.
WeightView rows_of(const CheckpointTensor& tensor, int64_t first, int64_t rows) {
    const DType dtype = *weight_dtype(tensor.entry.dtype);
    const int64_t cols = tensor.entry.shape.back();
    return {tensor.data + first * cols * dtype_size(dtype), dtype, rows, cols};
}

// experts.gate_up_proj [experts, 2 * width, hidden] (gate rows first), experts.down_proj [experts, hidden,
// width].
void bind_fused_experts(Binder& binder, const std::string& prefix, MoeWeights& moe) {
    const ModelConfig& config = binder.config();
    const int64_t width = config.moe_intermediate_size;
    const int64_t hidden = config.hidden_size;
    const CheckpointTensor* gate_up =
        binder.fused(prefix + "experts.gate_up_proj", {config.num_experts, 2 * width, hidden});
    const CheckpointTensor* down =
        binder.fused(prefix + "experts.down_proj", {config.num_experts, hidden, width});
    if (gate_up == nullptr || down == nullptr) {
        return;
    }
    for (int64_t e = 0; e < config.num_experts; ++e) {
        MlpWeights expert;
        expert.gate.weight = rows_of(*gate_up, 2 * width * e, width);
        expert.up.weight = rows_of(*gate_up, 2 * width * e + width, width);
        expert.down.weight = rows_of(*down, hidden * e, hidden);
        moe.experts.push_back(expert);
    }
}

MoeWeights bind_moe(Binder& binder, const std::string& prefix) {
    const ModelConfig& config = binder.config();
    MoeWeights moe;
    moe.router = binder.matrix(prefix + "router.gate.weight", config.num_experts, config.hidden_size);
    if (config.router_expert_bias) {
        moe.expert_bias = binder.float_vector(prefix + "expert_bias", config.num_experts);
    }
    moe.shared = bind_mlp(binder, prefix + "shared_mlp.", config.shared_width());
    if (binder.has(prefix + "experts.gate_up_proj")) {
        bind_fused_experts(binder, prefix, moe);
        return moe;
    }
    for (int64_t e = 0; e < config.num_experts && binder.ok(); ++e) {
        moe.experts.push_back(bind_expert(binder, fmt::format("{}experts.{}.", prefix, e)));
    }
    return moe;
}

AttentionWeights bind_attention(Binder& binder, const std::string& prefix) {
    const ModelConfig& config = binder.config();
    AttentionWeights attention;
    attention.q = binder.linear(prefix + "q_proj", config.q_width(), config.hidden_size);
    attention.k = binder.linear(prefix + "k_proj", config.kv_width(), config.hidden_size);
    attention.v = binder.linear(prefix + "v_proj", config.kv_width(), config.hidden_size);
    attention.o = binder.linear(prefix + "o_proj", config.hidden_size, config.q_width());
    attention.q_norm = binder.vector(prefix + "q_norm.weight", config.head_dim);
    attention.k_norm = binder.vector(prefix + "k_norm.weight", config.head_dim);
    return attention;
}

LayerWeights bind_layer(Binder& binder, int64_t index, bool moe) {
    const std::string prefix = layer_prefix(index);
    const int64_t hidden = binder.config().hidden_size;
    LayerWeights layer;
    layer.input_norm = binder.vector(prefix + "input_layernorm.weight", hidden);
    layer.post_attention_norm = binder.vector(prefix + "post_attention_layernorm.weight", hidden);
    layer.attention = bind_attention(binder, prefix + "self_attn.");
    if (moe) {
        layer.moe = bind_moe(binder, prefix + "mlp.");
    } else {
        layer.dense = bind_mlp(binder, prefix + "mlp.", binder.config().intermediate_size);
    }
    return layer;
}

MtpWeights bind_mtp(Binder& binder) {
    const int64_t index = binder.config().num_layers;
    const int64_t hidden = binder.config().hidden_size;
    const std::string prefix = layer_prefix(index);
    MtpWeights mtp;
    mtp.embedding_norm = binder.vector(prefix + "enorm.weight", hidden);
    mtp.hidden_norm = binder.vector(prefix + "hnorm.weight", hidden);
    mtp.final_norm = binder.vector(prefix + "final_layernorm.weight", hidden);
    mtp.projection = binder.linear(prefix + "eh_proj", hidden, 2 * hidden);
    mtp.layer = bind_layer(binder, index, true);
    return mtp;
}

// Static KV scales: all trunk layers have both, or none has any. The MTP layer's may be absent (1 then), as
// some calibration tools run the trunk only.
void bind_kv_scales(Binder& binder, ModelWeights& weights) {
    const auto names = [](int64_t layer) {
        const std::string prefix = layer_prefix(layer) + "self_attn.";
        return std::array{prefix + "k_scale", prefix + "v_scale"};
    };
    const int64_t trunk = binder.config().num_layers;
    bool any = binder.quant().static_kv_scales;
    for (int64_t i = 0; i < trunk && !any; ++i) {
        any = binder.has(names(i)[0]) || binder.has(names(i)[1]);
    }
    weights.kv_scales_static = any;
    if (!any) {
        return;
    }
    const auto bind = [&](int64_t index, AttentionWeights& attention) {
        attention.k_scale = binder.scalar(names(index)[0]).value_or(1);
        attention.v_scale = binder.scalar(names(index)[1]).value_or(1);
    };
    for (int64_t i = 0; i < trunk; ++i) {
        bind(i, weights.layers[static_cast<size_t>(i)].attention);
    }
    if (!weights.mtp) {
        return;
    }
    if (binder.has(names(trunk)[0]) || binder.has(names(trunk)[1])) {
        bind(trunk, weights.mtp->layer.attention);
    } else {
        log_warning("the checkpoint has no KV scales for the MTP layer; 1 is taken");
    }
}

}  // namespace

Result<ModelWeights> bind_weights(const ModelConfig& config, const QuantConfig& quant,
                                  Checkpoint& checkpoint) {
    Binder binder(config, quant, checkpoint);
    ModelWeights weights;
    weights.embedding = binder.matrix("model.embed_tokens.weight", config.vocab_size, config.hidden_size);
    weights.final_norm = binder.vector("model.norm.weight", config.hidden_size);
    if (config.tie_word_embeddings) {
        weights.lm_head.weight = weights.embedding;
    } else {
        weights.lm_head = binder.linear("lm_head", config.vocab_size, config.hidden_size);
    }
    for (int64_t i = 0; i < config.num_layers && binder.ok(); ++i) {
        weights.layers.push_back(bind_layer(binder, i, config.is_moe(i)));
    }
    if (config.num_mtp_layers > 0 && binder.ok()) {
        weights.mtp = bind_mtp(binder);
    }
    if (binder.ok()) {
        bind_kv_scales(binder, weights);
    }
    binder.check_all_used();
    if (!binder.ok()) {
        return binder.status();
    }
    return weights;
}

}  // namespace tessera

#include "weights/w4a8_export.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <fmt/format.h>

#include "weights/bind/float_convert.h"
#include "weights/checkpoint/files.h"
#include "weights/export/model_folder.h"
#include "weights/export/model_walk.h"
#include "weights/export_folder.h"

namespace tessera {
namespace {

constexpr std::string_view kExperts = R"(re:.*mlp\.experts\..*_proj$)";

// The form of llm-compressor, "pack-quantized".
json::Value quantization_config() {
    const json::Value weights = json::Value::object({{"num_bits", 4},
                                                     {"type", "int"},
                                                     {"symmetric", true},
                                                     {"strategy", "group"},
                                                     {"group_size", kInt4Group},
                                                     {"dynamic", false}});
    const json::Value inputs = json::Value::object(
        {{"num_bits", 8}, {"type", "float"}, {"symmetric", true}, {"strategy", "token"}, {"dynamic", true}});
    const json::Value group = json::Value::object({{"targets", json::Value::array({json::Value(kExperts)})},
                                                   {"weights", weights},
                                                   {"input_activations", inputs},
                                                   {"output_activations", nullptr},
                                                   {"format", "pack-quantized"}});
    return json::Value::object({{"quant_method", "compressed-tensors"},
                                {"format", "pack-quantized"},
                                {"quantization_status", "compressed"},
                                {"config_groups", json::Value::object({{"group_0", group}})},
                                {"ignore", json::Value::array({json::Value("lm_head")})}});
}

// The scale of a group: its largest magnitude becomes code 8 of the negative side. The clipped 7 of a largest
// positive weight costs less than a wider step for all: 0.106 of the deviation in all, against 0.117 with
// / 7.
uint16_t group_scale(const float* values) {
    float largest = 0;
    for (int64_t i = 0; i < kInt4Group; ++i) {
        largest = std::max(largest, std::fabs(values[i]));
    }
    const uint16_t bits = bfloat16_bits(largest / 8);
    return float_from_bfloat16(bits) > 0 ? bits : bfloat16_bits(1);  // a group of zeros may have any
}

uint8_t nearest_code(float value, float scale) {
    const float code = std::clamp(std::nearbyint(value / scale), -8.0f, 7.0f);
    return static_cast<uint8_t>(static_cast<int>(code) + 8);
}

// Codes [rows, cols / 2] + 8, and scales [rows, groups]; either may be null.
void quantize_row(const std::vector<float>& values, std::byte* codes, std::byte* scales) {
    for (size_t k = 0; k < values.size(); k += kInt4Group) {
        const uint16_t bits = group_scale(values.data() + k);
        if (scales != nullptr) {
            std::memcpy(scales + k / kInt4Group * 2, &bits, 2);
        }
        const float scale = float_from_bfloat16(bits);
        for (size_t i = k; codes != nullptr && i < k + kInt4Group; i += 2) {
            const int low = nearest_code(values[i], scale);
            const int high = nearest_code(values[i + 1], scale);
            codes[i / 2] = static_cast<std::byte>(low | high << 4);
        }
    }
}

// A tensor whose bytes are made row by row.
OutputTensor made_by_rows(OutputTensor tensor, const WeightView& weight, bool codes, ThreadPool& pool) {
    tensor.make = [weight, codes, &pool](std::span<std::byte> out) {
        const int64_t row_bytes = static_cast<int64_t>(out.size()) / weight.rows;
        std::vector<std::vector<float>> rows(static_cast<size_t>(pool.size()));
        pool.parallel_for(weight.rows, [&](int64_t row, int thread) {
            std::vector<float>& values = rows[static_cast<size_t>(thread)];
            widen_row(weight, row, values);
            std::byte* to = out.data() + row * row_bytes;
            quantize_row(values, codes ? to : nullptr, codes ? nullptr : to);
        });
    };
    return tensor;
}

class W4a8Sink : public TensorSink {
  public:
    explicit W4a8Sink(ThreadPool& pool) : pool_(pool) {}

    std::vector<OutputTensor> take() { return std::move(tensors_); }

    void plain(const std::string& name, const WeightView& view, std::vector<int64_t> shape) override {
        tensors_.push_back(plain_tensor(name, view, std::move(shape)));
    }
    void linear(const std::string& module, const LinearWeights& linear, const LinearPlace& place) override {
        const WeightView& weight = linear.weight;
        if (!place.routed) {
            plain(module + ".weight", weight, {weight.rows, weight.cols});
            return;
        }
        const int64_t rows = weight.rows;
        const int64_t cols = weight.cols;
        const int64_t groups = cols / kInt4Group;
        tensors_.push_back(made_by_rows({.name = module + ".weight_packed",
                                         .dtype = "I32",
                                         .shape = {rows, cols / 8},
                                         .bytes = rows * cols / 2},
                                        weight, true, pool_));
        tensors_.push_back(made_by_rows({.name = module + ".weight_scale",
                                         .dtype = "BF16",
                                         .shape = {rows, groups},
                                         .bytes = rows * groups * 2},
                                        weight, false, pool_));
        tensors_.push_back({.name = module + ".weight_shape",
                            .dtype = "I64",
                            .shape = {2},
                            .bytes = 16,
                            .make = [rows, cols](std::span<std::byte> out) {
                                std::memcpy(out.data(), &rows, 8);
                                std::memcpy(out.data() + 8, &cols, 8);
                            }});
    }
    void kv_cache(const std::string&, size_t) override {}

  private:
    ThreadPool& pool_;
    std::vector<OutputTensor> tensors_;
};

Status check_finite(const LoadedModel& model, ThreadPool& pool) {
    std::vector<std::vector<float>> rows(static_cast<size_t>(pool.size()));
    const auto check_linear = [&](const LinearWeights& linear, const std::string& module) -> Status {
        std::atomic<bool> finite = true;
        pool.parallel_for(linear.weight.rows, [&](int64_t row, int thread) {
            std::vector<float>& values = rows[static_cast<size_t>(thread)];
            widen_row(linear.weight, row, values);
            if (!std::ranges::all_of(values, [](float v) { return std::isfinite(v); })) {
                finite = false;
            }
        });
        return finite ? Status()
                      : invalid_argument(fmt::format(
                            "{}.weight: holds a value that is not finite; every weight must be", module));
    };
    const auto check_layer = [&](const LayerWeights& layer, size_t index) -> Status {
        for (size_t e = 0; layer.moe && e < layer.moe->experts.size(); ++e) {
            const MlpWeights& expert = layer.moe->experts[e];
            const std::string prefix = fmt::format("model.layers.{}.mlp.experts.{}.", index, e);
            for (const auto& [linear, name] :
                 {std::pair(&expert.gate, "gate_proj"), std::pair(&expert.up, "up_proj"),
                  std::pair(&expert.down, "down_proj")}) {
                if (Status status = check_linear(*linear, prefix + name); !status.ok()) {
                    return status;
                }
            }
        }
        return {};
    };
    const std::vector<LayerWeights>& layers = model.weights.layers;
    for (size_t i = 0; i < layers.size(); ++i) {
        if (Status status = check_layer(layers[i], i); !status.ok()) {
            return status;
        }
    }
    return model.weights.mtp ? check_layer(model.weights.mtp->layer, layers.size()) : Status();
}

}  // namespace

Status check_w4a8_export(const LoadedModel& model, const std::string& folder) {
    if (Status status = check_quantise(model, folder); !status.ok()) {
        return status;
    }
    const ModelConfig& config = model.config;
    for (const auto& [key, size] : {std::pair("hidden_size", config.hidden_size),
                                    std::pair("moe_intermediate_size", config.moe_intermediate_size)}) {
        if (size % kInt4Group != 0) {
            return invalid_argument(
                fmt::format("{}: config.json: {} is {}; w4a8 needs a multiple of {}, the inputs that share a "
                            "scale",
                            model.folder, key, size, kInt4Group));
        }
    }
    return {};
}

Status export_w4a8(const LoadedModel& model, const W4a8Export& options, const std::string& folder,
                   ThreadPool& pool) {
    const std::string target = without_trailing_slash(folder);
    Status status = check_w4a8_export(model, target);
    status = status.ok() ? check_finite(model, pool) : status;
    if (!status.ok()) {
        return status;
    }
    Result<PendingFolder> pending = PendingFolder::create(target);
    if (!pending.ok()) {
        return pending.status();
    }
    const std::string& path = pending->path();
    W4a8Sink sink(pool);
    walk_model(model.config, model.weights, sink);
    status = write_shards(path, sink.take(), {},
                          {.bytes_max = options.shard_bytes_max, .progress = options.progress});
    status = status.ok() ? write_config(model.folder, path, quantization_config()) : status;
    status = status.ok() ? copy_small_files(model.folder, path) : status;
    return pending->finish(status, target);
}

}  // namespace tessera

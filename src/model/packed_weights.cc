#include "model/packed_weights.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <fmt/format.h>
#include <string>

#include "model/weight_value.h"
#include "weights/int4_weights.h"

namespace tessera {
namespace {

constexpr int64_t kAlign = 128;  // a pair of cache lines

// One matrix to be packed from up to three sources, stacked (q, k, v) or with alternating panels (gate, up).
struct MatrixJob {
    PackedMatrix matrix;
    std::array<MatrixSource, 3> parts;
    std::array<const LinearWeights*, 3> linears{};
    int parts_count = 0;
    bool alternate = false;

    struct Place {
        int part = 0;
        int64_t row = 0;
    };
    Place place(int64_t index) const {
        int part = 0;
        int64_t row = index * kPanelOutputs;
        if (alternate) {
            part = static_cast<int>(index % parts_count);
            row = index / parts_count * kPanelOutputs;
        } else {
            while (row >= padded_rows(parts[static_cast<size_t>(part)])) {
                row -= padded_rows(parts[static_cast<size_t>(part++)]);
            }
        }
        return {part, row};
    }

    void pack(int64_t index, std::byte* scratch) const {
        const auto [part, row] = place(index);
        const MatrixSource& source = parts[static_cast<size_t>(part)];
        const int64_t rows = std::min(kPanelOutputs, source.rows - row);
        if (source.dtype == DType::kInt4) {
            pack_int4(index, {linears[static_cast<size_t>(part)], row, rows, nullptr, nullptr}, scratch);
        } else {
            pack_panel(matrix, index, {&source, row, rows}, scratch);
        }
    }

    // Through a copy of the rows in the one form that pack_panel() takes.
    void pack_int4(int64_t index, Int4Rows rows, std::byte* scratch) const {
        const int64_t inputs = matrix.inputs;
        std::vector<uint8_t> codes(static_cast<size_t>(rows.rows * inputs / 2));
        std::vector<uint16_t> scales(static_cast<size_t>(rows.rows * matrix.groups()));
        rows.codes = codes.data();
        rows.scales = scales.data();
        int4_rows(rows);
        const MatrixSource copy{codes.data(), DType::kInt4, rows.rows, inputs, 1.0f, scales.data()};
        pack_panel(matrix, index, {&copy, 0, rows.rows}, scratch);
    }

    static int64_t padded_rows(const MatrixSource& source) {
        return (source.rows + kPanelOutputs - 1) / kPanelOutputs * kPanelOutputs;
    }
};

// Lays the arena out. The binding below runs twice with it: first without memory, to learn the size, then
// with it.
class Arena {
  public:
    Arena(std::byte* data, bool weight_only) : data_(data), weight_only_(weight_only) {}

    int64_t bytes() const { return bytes_; }
    const std::vector<MatrixJob>& jobs() const { return jobs_; }
    const Status& status() const { return status_; }

    const float* floats(const WeightView& view) {
        const int64_t n = view.rows * view.cols;
        auto* out = reinterpret_cast<float*>(take(n * 4));
        if (out != nullptr) {
            widen(view, n, out);
        }
        return out;
    }

    const void* copy(const WeightView& view) {
        const int64_t n = view.rows * view.cols * dtype_size(view.dtype);
        std::byte* out = take(n);
        if (out != nullptr) {
            std::memcpy(out, view.data, static_cast<size_t>(n));
        }
        return out;
    }

    struct Parts {
        std::vector<const LinearWeights*> linears;
        bool alternate = false;
    };
    PackedMatrix matrix(const std::string& name, const Parts& parts) {
        const LinearWeights& first = *parts.linears.front();
        MatrixJob job;
        job.alternate = parts.alternate;
        bool scaled = false;
        const bool grouped = first.weight.dtype == DType::kInt4 || first.blocks;
        for (const LinearWeights* linear : parts.linears) {
            const WeightView& view = linear->weight;
            if (packed_dtype(view.dtype) != packed_dtype(first.weight.dtype) ||
                linear->blocks.has_value() != first.blocks.has_value() ||
                (!weight_only_ && linear->input_scale != first.input_scale)) {
                refuse(
                    fmt::format("{}: the projections that are computed together differ in dtype, input scale "
                                "or blocks of scales; one of each is needed",
                                name));
            }
            job.linears[static_cast<size_t>(job.parts_count)] = linear;
            job.parts[static_cast<size_t>(job.parts_count++)] = {
                .data = view.data,
                .dtype = view.dtype,
                .rows = view.rows,
                .inputs = view.cols,
                .scale = linear->weight_scale.value_or(1.0f),
                .block_scales = linear->blocks ? linear->blocks->scales : nullptr};
            job.matrix.outputs += MatrixJob::padded_rows(job.parts[static_cast<size_t>(job.parts_count - 1)]);
            scaled = scaled || linear->weight_scale.has_value();
        }
        job.matrix.dtype = packed_dtype(first.weight.dtype);
        job.matrix.inputs = first.weight.cols;
        job.matrix.input_scale = weight_only_ ? 0.0f : first.input_scale.value_or(0.0f);
        job.matrix.data = take(job.matrix.bytes());
        if (grouped) {
            job.matrix.input_dynamic = !weight_only_;
            job.matrix.group_scale =
                reinterpret_cast<float*>(take(job.matrix.groups() * job.matrix.outputs * 4));
        }
        if (scaled) {
            job.matrix.column_scale = reinterpret_cast<float*>(take(job.matrix.outputs * 4));
        }
        if (data_ != nullptr) {
            jobs_.push_back(job);
        }
        return job.matrix;
    }

  private:
    std::byte* take(int64_t n) {
        std::byte* place = data_ == nullptr ? nullptr : data_ + bytes_;
        bytes_ += (n + kAlign - 1) / kAlign * kAlign;
        return place;
    }

    static void widen(const WeightView& view, int64_t n, float* out) {
        if (view.dtype == DType::kFloat32) {
            std::memcpy(out, view.data, static_cast<size_t>(n) * 4);
            return;
        }
        for (int64_t i = 0; i < n; ++i) {
            out[i] = weight_value(view, static_cast<size_t>(i));
        }
    }

    void refuse(std::string message) {
        if (status_.ok()) {
            status_ = unimplemented(std::move(message));
        }
    }

    std::byte* data_ = nullptr;
    bool weight_only_ = false;
    int64_t bytes_ = 0;
    std::vector<MatrixJob> jobs_;
    Status status_;
};

ExpertWeights bind_mlp(const MlpWeights& mlp, const std::string& name, Arena& arena) {
    ExpertWeights out;
    out.gate_up = arena.matrix(name + ".gate_proj and up_proj", {{&mlp.gate, &mlp.up}, true});
    out.down = arena.matrix(name + ".down_proj", {{&mlp.down}});
    return out;
}

PackedLayer bind_layer(const ModelConfig& config, const LayerWeights& weights, const std::string& name,
                       Arena& arena) {
    PackedLayer layer;
    layer.input_norm = arena.floats(weights.input_norm);
    layer.post_attention_norm = arena.floats(weights.post_attention_norm);
    const AttentionWeights& attention = weights.attention;
    if (config.qk_norm) {
        layer.q_norm = arena.floats(attention.q_norm);
        layer.k_norm = arena.floats(attention.k_norm);
    }
    layer.qkv = arena.matrix(name + ".self_attn q_proj, k_proj and v_proj",
                             {{&attention.q, &attention.k, &attention.v}});
    layer.o = arena.matrix(name + ".self_attn.o_proj", {{&attention.o}});
    if (weights.dense.has_value()) {
        layer.shared = bind_mlp(*weights.dense, name + ".mlp", arena);
        return layer;
    }
    const MoeWeights& moe = *weights.moe;
    layer.is_moe = true;
    const LinearWeights router{moe.router, {}, {}};
    layer.router = arena.matrix(name + ".mlp.router", {{&router}});
    if (config.router_expert_bias) {
        layer.expert_bias = arena.floats(moe.expert_bias);
    }
    for (size_t e = 0; e < moe.experts.size(); ++e) {
        layer.experts.push_back(bind_mlp(moe.experts[e], fmt::format("{}.mlp.experts.{}", name, e), arena));
    }
    if (config.num_shared_experts > 0) {
        layer.shared = bind_mlp(moe.shared, name + ".mlp.shared_mlp", arena);
    }
    return layer;
}

PackedModel bind_model(const ModelConfig& config, const ModelWeights& weights, Arena& arena) {
    PackedModel model;
    model.embedding = arena.copy(weights.embedding);
    model.embedding_dtype = weights.embedding.dtype;
    model.lm_head = arena.matrix("lm_head", {{&weights.lm_head}});
    model.final_norm = arena.floats(weights.final_norm);
    for (size_t i = 0; i < weights.layers.size(); ++i) {
        model.layers.push_back(
            bind_layer(config, weights.layers[i], fmt::format("model.layers.{}", i), arena));
    }
    if (weights.mtp.has_value()) {
        const MtpWeights& mtp = *weights.mtp;
        const std::string name = fmt::format("model.layers.{}", weights.layers.size());
        model.mtp.embedding_norm = arena.floats(mtp.embedding_norm);
        model.mtp.hidden_norm = arena.floats(mtp.hidden_norm);
        model.mtp.final_norm = arena.floats(mtp.final_norm);
        model.mtp.projection = arena.matrix(name + ".eh_proj", {{&mtp.projection}});
        model.mtp.layer = bind_layer(config, mtp.layer, name, arena);
    }
    return model;
}

void run_jobs(const std::vector<MatrixJob>& jobs, ThreadPool& pool) {
    int64_t scratch_bytes = 0;
    for (const MatrixJob& job : jobs) {
        scratch_bytes = std::max(scratch_bytes, pack_scratch_bytes(job.matrix.inputs));
    }
    std::vector<std::vector<std::byte>> scratch(static_cast<size_t>(pool.size()));
    for (std::vector<std::byte>& bytes : scratch) {
        bytes.resize(static_cast<size_t>(scratch_bytes));
    }
    pool.parallel_for(static_cast<int64_t>(jobs.size()), [&](int64_t i, int thread) {
        const MatrixJob& job = jobs[static_cast<size_t>(i)];
        for (int64_t p = 0; p < job.matrix.panels(); ++p) {
            job.pack(p, scratch[static_cast<size_t>(thread)].data());
        }
    });
}

}  // namespace

Result<PackedModel> pack_model(const ModelConfig& config, const ModelWeights& weights,
                               const ModelOptions& options, ThreadPool& pool) {
    if (weights.embedding.dtype == DType::kFloat8E4M3) {
        return unimplemented("model.embed_tokens.weight is float8; bfloat16, float16 or float32 is needed");
    }
    Arena measure(nullptr, options.weight_only);
    bind_model(config, weights, measure);
    if (!measure.status().ok()) {
        return measure.status();
    }
    Result<HostBuffer> memory = HostBuffer::allocate(measure.bytes(), "the weights",
                                                     "a quantised copy (tessera quantize) needs less");
    if (!memory.ok()) {
        return memory.status();
    }
    Arena arena(memory->data(), options.weight_only);
    PackedModel model = bind_model(config, weights, arena);
    run_jobs(arena.jobs(), pool);
    model.arena = memory.take();
    return model;
}

}  // namespace tessera

// The cases of attention on the device: decode, prefill and the decode plan.
#pragma once

#include <cmath>
#include <fmt/format.h>
#include <numeric>

#include "base/thread_pool.h"
#include "device/cuda/device_props.h"
#include "ops/attention/cuda/attention_cuda.h"
#include "ops/cuda/cuda_case.h"
#include "ops/cuda/cuda_noise.h"

namespace tessera {

enum class AttentionCudaPart : uint8_t { kDecode, kDecodePlan, kPrefill };

struct AttentionCudaSpec {
    struct Sequence {
        int32_t position = 0;  // of the first query = tokens before it; < 0: an empty row
        int32_t q_len = 1;
    };
    AttentionCudaPart part = AttentionCudaPart::kDecode;
    std::string name;
    AttentionCudaShape heads;
    std::vector<Sequence> sequences;
    bool fp8 = false;
    int32_t first_slot = 0;
    int32_t slots_max = 32768;
    bool bench = true;  // compared on samples

    int32_t slots(const Sequence& s) const { return s.position < 0 ? 0 : first_slot + s.position + s.q_len; }
    CudaCosts costs() const {
        CudaCosts costs{.unit = fp8 ? CudaUnit::kFloat8 : CudaUnit::kBFloat16};
        for (const Sequence& s : sequences) {
            const int64_t seen = std::max(s.position, 0) + int64_t{s.q_len};
            costs.bytes +=
                seen * heads.kv_heads * 256 * (fp8 ? 1 : 2) + int64_t{s.q_len} * heads.q_heads * 512;
            costs.flops += (2 * seen - s.q_len + 1) * s.q_len / 2 * heads.q_heads * 512;
        }
        if (part == AttentionCudaPart::kDecodePlan) {
            costs = {.bytes = static_cast<int64_t>(sequences.size()) * 4, .flops = 0};
        }
        return costs;
    }
};

// The pages lie in random order and hold one layer for each set. In set 0 the slots that no query may see are
// NaN.
class AttentionCudaCase {
  public:
    AttentionCudaCase(const CudaCaseData& data, const AttentionCudaSpec& spec)
        : spec_(spec),
          random_(data.seed),
          layer_(int64_t{2} * spec.heads.kv_heads * kPage),
          page_(layer_ * data.sets) {
        lay_out();
        const CudaCaseData one{data.budget, 1, data.seed};
        const DType dtype = spec.fp8 ? DType::kFloat8E4M3 : DType::kBFloat16;
        pool_ = std::make_unique<DeviceNoise>(one, pages_ * page_,
                                              NoiseSpec{random_.next() & 0xFFFFFF, 1, dtype});
        q_ = std::make_unique<DeviceNoise>(data, rows_ * width(),
                                           NoiseSpec{random_.next() & 0xFFFFFF, 1.5f, DType::kBFloat16});
        out_ = std::make_unique<DeviceScratch>(data, rows_ * width() * 2, data.sets);
        d_tables_ = std::make_unique<DeviceArray<int32_t>>(data.budget, tables_, 1);
        d_positions_ = std::make_unique<DeviceArray<int32_t>>(data.budget, positions_, 1);
        d_first_rows_ = std::make_unique<DeviceArray<int32_t>>(data.budget, first_rows_, 1);
        const Result<DeviceProps> device = open_device(0);
        tessera::check(device.ok(), "no device");
        sm_count_ = device->sm_count;
        const auto batch = static_cast<int32_t>(spec.sequences.size());
        const int64_t bytes =
            spec.part == AttentionCudaPart::kPrefill
                ? prefill_cuda_workspace_bytes(spec.heads, batch, static_cast<int32_t>(rows_))
                : decode_cuda_workspace_bytes(decode_plan());
        workspace_ = std::make_unique<DeviceScratch>(one, bytes, 1);
        plan(nullptr);
        cuda_check(cudaDeviceSynchronize());
    }

    void launch(cudaStream_t stream, int set) {
        if (spec_.part == AttentionCudaPart::kDecodePlan) {
            plan(stream);
        } else {
            attend(stream, set, true);
        }
    }
    OpError check(cudaStream_t stream) {
        hide_unseen();
        out_->poison();
        workspace_->poison();
        plan(stream);
        attend(stream, 0, false);
        cuda_check(cudaStreamSynchronize(stream));
        const std::vector<float> all = widen_bf16(out_->download<uint16_t>());
        // A pair is a row and a query head.
        const int64_t pairs = rows_ * spec_.heads.q_heads;
        const int64_t longest = int64_t{pages_max_} * 64;
        const int64_t most = std::clamp<int64_t>((1 << 21) / longest, 16, 256);
        const std::vector<int64_t> sampled = sampled_indices(pairs, spec_.bench ? most : pairs, random_);
        std::vector<float> got(sampled.size() * kHeadDim);
        std::vector<float> want(got.size());
        ThreadPool threads(reference_threads());
        threads.parallel_for(static_cast<int64_t>(sampled.size()), [&](int64_t i, int) {
            const int64_t at = sampled[static_cast<size_t>(i)] * kHeadDim;
            std::copy_n(all.data() + at, kHeadDim, got.data() + i * kHeadDim);
            reference(at / width(), at % width() / kHeadDim, want.data() + i * kHeadDim);
        });
        // The weights of the softmax are rounded before they meet V, the result once more; in prefill with
        // fp8 pages q and the weights become e4m3.
        const bool narrow = spec_.fp8 && spec_.part == AttentionCudaPart::kPrefill;
        OpError error = compare_sums(got, want, narrow ? 0.8 : 0.04, 0.0079);
        error.mismatches += error.rms > (narrow ? 4.5e-2 : 5e-3);
        error += count_unwritten(all);
        return error;
    }

  private:
    static constexpr int64_t kHeadDim = 128;
    static constexpr int64_t kPage = 64 * kHeadDim;  // elements of a head in a page

    int64_t width() const { return spec_.heads.q_heads * kHeadDim; }
    int64_t size() const { return spec_.fp8 ? 1 : 2; }
    float k_scale() const { return spec_.fp8 ? 0.7f : 1.0f; }
    float v_scale() const { return spec_.fp8 ? 1.3f : 1.0f; }
    static float scale() { return 1 / std::sqrt(static_cast<float>(kHeadDim)); }

    void lay_out() {
        for (const auto& s : spec_.sequences) {
            positions_.push_back(s.position);
            first_rows_.push_back(static_cast<int32_t>(rows_));
            rows_ += s.q_len;
            pages_ += (spec_.slots(s) + 63) / 64;
            pages_max_ = std::max(pages_max_, (spec_.slots(s) + 63) / 64);
        }
        first_rows_.push_back(static_cast<int32_t>(rows_));
        std::vector<int32_t> ids(static_cast<size_t>(pages_));
        std::iota(ids.begin(), ids.end(), 0);
        for (int64_t i = 0; i < pages_; ++i) {
            std::swap(ids[static_cast<size_t>(i)], ids[static_cast<size_t>(random_.below(pages_))]);
        }
        size_t next = 0;
        for (const auto& s : spec_.sequences) {
            for (int32_t page = 0; page < pages_max_; ++page) {
                tables_.push_back(page < (spec_.slots(s) + 63) / 64 ? ids[next++] : -1);
            }
        }
    }
    // The slot's begin in the pool, in elements; of V: v = 1.
    int64_t element(size_t sequence, int64_t slot, int64_t kv_head, int64_t v) const {
        const auto entry = sequence * static_cast<size_t>(pages_max_) + static_cast<size_t>(slot / 64);
        return tables_[entry] * page_ + (v * spec_.heads.kv_heads + kv_head) * kPage + slot % 64 * kHeadDim;
    }
    void hide_unseen() {
        const auto hide = [&](size_t sequence, int64_t slot, int64_t slots) {
            for (int64_t head = 0; slots > 0 && head < 2 * spec_.heads.kv_heads; ++head) {
                const int64_t kv_head = head % spec_.heads.kv_heads;
                const int64_t at = element(sequence, slot, kv_head, head / spec_.heads.kv_heads);
                fill_blocking(pool_->at(0) + at * size(), 0xFF, slots * kHeadDim * size());
            }
        };
        for (size_t b = 0; b < spec_.sequences.size(); ++b) {
            const int64_t slots = spec_.slots(spec_.sequences[b]);
            if (slots > 0) {
                hide(b, 0, spec_.first_slot);
                hide(b, slots, (64 - slots % 64) % 64);
            }
        }
        cuda_check(cudaDeviceSynchronize());
    }

    DecodePlanCudaArgs decode_plan() const {
        return {.shape = spec_.heads,
                .positions = d_positions_->at(0),
                .batch = static_cast<int32_t>(spec_.sequences.size()),
                .q_len = spec_.sequences[0].q_len,
                .first_slot = spec_.first_slot,
                .slots_max = spec_.slots_max,
                .sm_count = sm_count_,
                .workspace = workspace_ == nullptr ? nullptr : workspace_->at(0)};
    }
    PrefillPlanCudaArgs prefill_plan() const {
        return {.first_rows = d_first_rows_->at(0),
                .positions = d_positions_->at(0),
                .first_slot = spec_.first_slot,
                .sequences = static_cast<int32_t>(spec_.sequences.size()),
                .rows_max = static_cast<int32_t>(rows_),
                .shape = spec_.heads,
                .workspace = workspace_->at(0)};
    }
    void plan(cudaStream_t stream) const {
        if (spec_.part == AttentionCudaPart::kPrefill) {
            prefill_plan_cuda(stream, prefill_plan());
        } else {
            decode_plan_cuda(stream, decode_plan());
        }
    }
    void attend(cudaStream_t stream, int set, bool settled) {
        const PagedKvCuda kv{.pool = pool_->at(0),
                             .page_stride = page_ * size(),
                             .k_offset = set * layer_ * size(),
                             .v_offset = (set * layer_ + layer_ / 2) * size(),
                             .dtype = spec_.fp8 ? DType::kFloat8E4M3 : DType::kBFloat16,
                             .k_scale = k_scale(),
                             .v_scale = v_scale(),
                             .page_tables = d_tables_->at(0),
                             .pages_max = pages_max_};
        if (spec_.part == AttentionCudaPart::kPrefill) {
            attention_prefill_cuda(stream, {.plan = prefill_plan(),
                                            .kv = kv,
                                            .q = q_->at(set),
                                            .q_stride = width(),
                                            .out = out_->at(set),
                                            .out_stride = width(),
                                            .scale = scale(),
                                            .sm_count = sm_count_,
                                            .settled = settled});
        } else {
            attention_decode_cuda(stream, {.plan = decode_plan(),
                                           .kv = kv,
                                           .q = q_->at(set),
                                           .q_stride = width(),
                                           .out = out_->at(set),
                                           .out_stride = width(),
                                           .scale = scale(),
                                           .settled = settled});
        }
    }

    // out: [kHeadDim]
    void reference(int64_t row, int64_t head, float* out) const {
        const auto after = std::upper_bound(first_rows_.begin(), first_rows_.end(), row);
        const auto b = static_cast<size_t>(after - first_rows_.begin()) - 1;
        const int64_t kv_head = head / (spec_.heads.q_heads / spec_.heads.kv_heads);
        std::fill_n(out, kHeadDim, 0.0f);
        if (positions_[b] < 0) {
            return;
        }
        const int64_t last = spec_.first_slot + positions_[b] + (row - first_rows_[b]);
        std::vector<double> q;
        for (int64_t d = 0; d < kHeadDim; ++d) {
            q.push_back(q_->value(row * width() + head * kHeadDim + d));
        }
        std::vector<double> weights;
        for (int64_t slot = spec_.first_slot; slot <= last; ++slot) {
            const int64_t at = element(b, slot, kv_head, 0);
            double score = 0;
            for (int64_t d = 0; d < kHeadDim; ++d) {
                score += q[static_cast<size_t>(d)] * static_cast<double>(pool_->value(at + d));
            }
            weights.push_back(score * static_cast<double>(scale() * k_scale()));
        }
        const double max = *std::max_element(weights.begin(), weights.end());
        double sum = 0;
        std::vector<double> mixed(kHeadDim);
        for (size_t i = 0; i < weights.size(); ++i) {
            const double p = std::exp(weights[i] - max);
            const int64_t at = element(b, spec_.first_slot + static_cast<int64_t>(i), kv_head, 1);
            sum += p;
            for (int64_t d = 0; d < kHeadDim; ++d) {
                mixed[static_cast<size_t>(d)] += p * static_cast<double>(pool_->value(at + d));
            }
        }
        for (int64_t d = 0; d < kHeadDim; ++d) {
            out[d] = static_cast<float>(mixed[static_cast<size_t>(d)] / sum * static_cast<double>(v_scale()));
        }
    }

    AttentionCudaSpec spec_;
    OpRandom random_;
    int64_t layer_ = 0, page_ = 0;  // elements of a page: one layer, all
    int64_t rows_ = 0, pages_ = 0;
    int32_t pages_max_ = 1;
    int sm_count_ = 0;
    std::vector<int32_t> positions_, first_rows_, tables_;
    std::unique_ptr<DeviceNoise> pool_, q_;
    std::unique_ptr<DeviceScratch> out_, workspace_;
    std::unique_ptr<DeviceArray<int32_t>> d_tables_, d_positions_, d_first_rows_;
};

inline CudaOpCase attention_cuda_case(const AttentionCudaSpec& spec) {
    const CudaCosts costs = spec.costs();
    return {fmt::format("{} {}/{}{}", spec.name, spec.heads.q_heads, spec.heads.kv_heads,
                        spec.first_slot > 0 ? " mtp" : ""),
            spec.fp8 ? "fp8_e4m3" : "bfloat16", spec.bench,
            [=](const CudaCaseData& data) {
                return make_cuda_run(std::make_shared<AttentionCudaCase>(data, spec), data.sets, costs);
            },
            // The plan's own data is tiny, the pages that its check reads are not.
            spec.part == AttentionCudaPart::kDecodePlan ? int64_t{1} << 30 : costs.bytes};
}

// `count` sequences of `slots` in all, q_len of them new.
inline std::vector<AttentionCudaSpec::Sequence> decode_batch(int count, int32_t slots, int32_t q_len = 1) {
    return std::vector<AttentionCudaSpec::Sequence>(static_cast<size_t>(count), {slots - q_len, q_len});
}

inline std::vector<CudaOpCase> attention_decode_cuda_cases() {
    std::vector<CudaOpCase> cases;
    const auto add = [&](AttentionCudaSpec spec, bool fp8) {
        spec.fp8 = fp8;
        cases.push_back(attention_cuda_case(spec));
    };
    auto mixed = decode_batch(15, 4096);
    mixed.insert(mixed.begin(), {65535, 1});
    for (const bool fp8 : {false, true}) {
        for (const int32_t q_len : {1, 2, 3, 4}) {
            AttentionCudaSpec spec{.name = fmt::format("edges q_len={}", q_len),
                                   .heads = {16, 2},
                                   .first_slot = q_len % 2,
                                   .slots_max = 4096,
                                   .bench = false};
            for (const int32_t position : {0, 1, 15, -1, 62, 63, 64, 127, 300, 511, 512, 1100}) {
                spec.sequences.push_back({position, q_len});
            }
            add(spec, fp8);
        }
        add({.name = "3x65", .heads = {4, 4}, .sequences = decode_batch(3, 65), .bench = false}, fp8);
        for (const AttentionCudaShape heads : {AttentionCudaShape{64, 8}, {32, 4}, {16, 2}, {8, 1}}) {
            add({.name = "64x4096", .heads = heads, .sequences = decode_batch(64, 4096)}, fp8);
        }
        add({.name = "64x4096 q_len=4", .heads = {64, 8}, .sequences = decode_batch(64, 4096, 4)}, fp8);
        for (const AttentionCudaShape heads : {AttentionCudaShape{64, 8}, {8, 1}}) {
            add({.name = "1x65536+15x4096", .heads = heads, .sequences = mixed, .slots_max = 65536}, fp8);
        }
        add({.name = "1x262144", .heads = {64, 8}, .sequences = decode_batch(1, 262144), .slots_max = 262144},
            fp8);
        add({.name = "1x4096", .heads = {64, 8}, .sequences = decode_batch(1, 4096)}, fp8);
        add({.name = "1x1024", .heads = {8, 1}, .sequences = decode_batch(1, 1024)}, fp8);
    }
    return cases;
}

inline std::vector<CudaOpCase> attention_plan_cuda_cases() {
    std::vector<CudaOpCase> cases;
    for (const int batch : {2, 64, 256}) {
        cases.push_back(attention_cuda_case({.part = AttentionCudaPart::kDecodePlan,
                                             .name = fmt::format("decode {}x2048", batch),
                                             .heads = {8, 1},
                                             .sequences = decode_batch(batch, 2048),
                                             .slots_max = 65536,
                                             .bench = batch > 2}));
    }
    // Contexts from 64 to 64K tokens, as many between n and 2n for every n.
    AttentionCudaSpec many{.part = AttentionCudaPart::kDecodePlan,
                           .name = "decode 256, 64 to 65536, q_len=4",
                           .heads = {64, 8},
                           .fp8 = true,
                           .slots_max = 65536};
    constexpr int kMany = 256;
    for (int i = 0; i < kMany; ++i) {
        const double slots = std::round(64 * std::pow(1024.0, static_cast<double>(i) / (kMany - 1)));
        many.sequences.push_back({static_cast<int32_t>(slots) - 4, 4});
    }
    cases.push_back(attention_cuda_case(many));
    return cases;
}

inline std::vector<CudaOpCase> attention_prefill_cuda_cases() {
    std::vector<CudaOpCase> cases;
    const auto add = [&](AttentionCudaSpec spec, bool fp8) {
        spec.part = AttentionCudaPart::kPrefill;
        spec.fp8 = fp8;
        cases.push_back(attention_cuda_case(spec));
    };
    for (const bool fp8 : {false, true}) {
        for (const AttentionCudaShape heads : {AttentionCudaShape{16, 2}, {4, 1}}) {
            add({.name = "edges",
                 .heads = heads,
                 .sequences = {{0, 1}, {0, 63}, {0, 65}, {129, 127}, {64, 24}, {700, 25}, {63, 2}},
                 .first_slot = heads.kv_heads % 2,
                 .bench = false},
                fp8);
        }
        for (const AttentionCudaShape heads : {AttentionCudaShape{64, 8}, {8, 1}}) {
            add({.name = "8192 after 0", .heads = heads, .sequences = {{0, 8192}}}, fp8);
        }
        add({.name = "1024 after 15360", .heads = {64, 8}, .sequences = {{15360, 1024}}}, fp8);
        add({.name = "2048 after 30720", .heads = {64, 8}, .sequences = {{30720, 2048}}}, fp8);
    }
    return cases;
}

}  // namespace tessera

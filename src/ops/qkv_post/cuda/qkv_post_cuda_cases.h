// The cases of qkv_post on the device.
#pragma once

#include <algorithm>
#include <cstring>
#include <fmt/format.h>

#include "ops/cuda/cuda_case.h"
#include "ops/qkv_post/cuda/qkv_post_cuda.h"

namespace tessera {

struct QkvPostCudaSpec {
    int64_t tokens = 1;
    int64_t q_heads = 16;
    int64_t kv_heads = 2;
    int64_t head_dim = 128;
    bool fp8 = false;
    bool norm = true;
    int32_t slot_shift = 0;
    bool norm_after_rope = false;
    bool hadamard = false;
    bool q_scales = false;  // q in e4m3, with a scale for each token and head
    bool k_scales = false;  // the same for K
    bool v_scales = false;  // a scale for each head
};

// Tokens belong to three sequences in turn, at positions that cross pages; token 1 is padding. q, k and v lie
// in one row, as a fused projection writes them. Pages hold two layers, of which the second is written.
class QkvPostCudaCase {
  public:
    QkvPostCudaCase(const CudaCaseData& data, const QkvPostCudaSpec& spec)
        : spec_(spec),
          width_((spec.q_heads + 2 * spec.kv_heads) * spec.head_dim),
          block_(spec.kv_heads * 64 * spec.head_dim),
          page_elements_(4 * block_ + 64 + spec.kv_heads * 256),
          max_pages_((spec.tokens / 3 + 64 + 2 + 63) / 64 + 1),
          rope_(rope_table(spec.tokens / 3 + 66, spec.head_dim, 11158840.0)) {
        OpRandom random(data.seed);
        qkv_ = random_bf16(random, spec.tokens * width_, 3);
        norms_ = random_bf16(random, 2 * spec.head_dim, 2);
        for (int64_t t = 0; t < spec.tokens; ++t) {
            positions_.push_back(t == 1 ? -1 : static_cast<int32_t>(t / 3 + 63));
            sequences_.push_back(static_cast<int32_t>(t % 3));
        }
        for (int64_t p = 0; p < 3 * max_pages_; ++p) {  // pages in no order
            table_.push_back(static_cast<int32_t>((p * 7 + 3) % (3 * max_pages_ + 1)));
        }
        for (int64_t h = 0; h < spec.kv_heads; ++h) {
            v_scales_.push_back(0.01f * static_cast<float>(h + 2));
        }
        const int64_t page_count = 3 * max_pages_ + 1;
        d_qkv_ = std::make_unique<DeviceArray<uint16_t>>(data.budget, qkv_, data.sets);
        d_q_ = std::make_unique<DeviceArray<uint16_t>>(
            data.budget,
            std::vector<uint16_t>(static_cast<size_t>(spec.tokens * spec.q_heads * spec.head_dim)),
            data.sets);
        d_q8_ = std::make_unique<DeviceArray<uint8_t>>(
            data.budget,
            std::vector<uint8_t>(static_cast<size_t>(spec.tokens * spec.q_heads * spec.head_dim)), data.sets);
        d_q_scale_ = std::make_unique<DeviceArray<float>>(
            data.budget, std::vector<float>(static_cast<size_t>(spec.tokens * spec.q_heads)), data.sets);
        d_v_scales_ = std::make_unique<DeviceArray<float>>(data.budget, v_scales_, 1);
        d_norms_ = std::make_unique<DeviceArray<uint16_t>>(data.budget, norms_, 1);
        d_rope_ = std::make_unique<DeviceArray<float>>(data.budget, rope_, 1);
        d_positions_ = std::make_unique<DeviceArray<int32_t>>(data.budget, positions_, 1);
        d_sequences_ = std::make_unique<DeviceArray<int32_t>>(data.budget, sequences_, 1);
        d_table_ = std::make_unique<DeviceArray<int32_t>>(data.budget, table_, 1);
        d_pages_ = std::make_unique<DeviceArray<uint8_t>>(
            data.budget, std::vector<uint8_t>(static_cast<size_t>(page_count * page_elements_ * element())),
            data.sets);
    }

    void launch(cudaStream_t stream, int set) {
        const auto* qkv = reinterpret_cast<const __nv_bfloat16*>(d_qkv_->at(set));
        const auto* norms = reinterpret_cast<const __nv_bfloat16*>(d_norms_->at(0));
        qkv_post_cuda(stream, {.tokens = spec_.tokens,
                               .q_heads = spec_.q_heads,
                               .kv_heads = spec_.kv_heads,
                               .head_dim = spec_.head_dim,
                               .q = qkv,
                               .k = qkv + spec_.q_heads * spec_.head_dim,
                               .v = qkv + (spec_.q_heads + spec_.kv_heads) * spec_.head_dim,
                               .q_stride = width_,
                               .kv_stride = width_,
                               .q_out = reinterpret_cast<__nv_bfloat16*>(d_q_->at(set)),
                               .q_out_stride = spec_.q_heads * spec_.head_dim,
                               .q_norm = spec_.norm ? norms : nullptr,
                               .k_norm = spec_.norm ? norms + spec_.head_dim : nullptr,
                               .eps = 1e-5f,
                               .rope = d_rope_->at(0),
                               .positions = d_positions_->at(0),
                               .slot_shift = spec_.slot_shift,
                               .sequences = d_sequences_->at(0),
                               .page_table = d_table_->at(0),
                               .page_table_stride = max_pages_,
                               .pages = reinterpret_cast<std::byte*>(d_pages_->at(set)),
                               .page_stride = page_elements_ * element(),
                               .k_offset = 2 * block_ * element(),
                               .v_offset = 3 * block_ * element(),
                               .kv_dtype = spec_.fp8 ? DType::kFloat8E4M3 : DType::kBFloat16,
                               .k_scale = kKScale,
                               .v_scale = kVScale,
                               .v_head_scale = spec_.v_scales ? d_v_scales_->at(0) : nullptr,
                               .k_scale_offset = spec_.k_scales ? scales_place() : -1,
                               .norm_after_rope = spec_.norm_after_rope,
                               .hadamard = spec_.hadamard,
                               .q8 = spec_.q_scales ? d_q8_->at(set) : nullptr,
                               .q8_stride = spec_.q_heads * spec_.head_dim,
                               .q8_scale = d_q_scale_->at(set)});
    }
    OpError check(cudaStream_t stream) {
        d_q_->poison();
        d_q8_->poison();
        d_q_scale_->poison();
        d_pages_->poison();
        launch(stream, 0);
        std::vector<float> q(static_cast<size_t>(spec_.tokens * spec_.q_heads * spec_.head_dim), NAN);
        std::vector<float> pages(static_cast<size_t>((3 * max_pages_ + 1) * page_elements_), NAN);
        std::vector<float> k_scales(static_cast<size_t>((3 * max_pages_ + 1) * spec_.kv_heads * 64), NAN);
        reference(q, pages, k_scales);
        // The norm's two roundings and the rotation's, each of which may fall the other way; e4m3 steps are
        // 1/8.
        OpError error =
            spec_.q_scales ? check_q8(q) : compare_close(widen_bf16(d_q_->download()), q, 0.03, 0.0079);
        std::vector<float> got = device_pages();
        if (spec_.k_scales) {
            error += compare_close(take_scales(got), k_scales, 0, 0.02);
        }
        error += compare_close(got, pages, spec_.fp8 ? 0.3 : 0.03, spec_.fp8 ? 0.126 : 0.0079);
        return error;
    }

  private:
    static constexpr float kKScale = 0.05f;
    static constexpr float kVScale = 0.02f;

    int64_t element() const { return spec_.fp8 ? 1 : 2; }
    int64_t scales_place() const { return (4 * block_ + 64) * element(); }

    // Dequantised; half a step of e4m3 is 1/16 of the value.
    OpError check_q8(const std::vector<float>& q) const {
        std::vector<float> got = widen_e4m3(d_q8_->download());
        const std::vector<float> scales = d_q_scale_->download();
        for (size_t i = 0; i < got.size(); ++i) {
            got[i] *= scales[i / static_cast<size_t>(spec_.head_dim)];
        }
        return compare_close(got, q, 0.04, 0.07);
    }
    // The K scales out of the pages' bytes, which become NaN.
    std::vector<float> take_scales(std::vector<float>& pages) const {
        const std::vector<uint8_t> bytes = d_pages_->download();
        const auto count = static_cast<size_t>(spec_.kv_heads * 64);
        std::vector<float> out;
        for (int64_t p = 0; p < 3 * max_pages_ + 1; ++p) {
            const int64_t first = p * page_elements_ + scales_place();
            out.resize(out.size() + count);
            std::memcpy(out.data() + out.size() - count, bytes.data() + first, count * 4);
            std::fill_n(pages.begin() + first, count * 4, NAN);
        }
        return out;
    }

    std::vector<float> device_pages() const {
        const std::vector<uint8_t> bytes = d_pages_->download();
        if (spec_.fp8) {
            return widen_e4m3(bytes);
        }
        return widen_bf16({reinterpret_cast<const uint16_t*>(bytes.data()), bytes.size() / 2});
    }
    std::vector<float> head(int64_t token, int64_t head) const {
        const int64_t d = spec_.head_dim;
        return widen_bf16({qkv_.data() + token * width_ + head * d, static_cast<size_t>(d)});
    }
    void apply_norm(std::vector<float>& x, const uint16_t* norm) const {
        double squares = 0;
        for (const float value : x) {
            squares += static_cast<double>(value) * value;
        }
        const float scale =
            static_cast<float>(1 / std::sqrt(squares / static_cast<double>(spec_.head_dim) + 1e-5));
        for (size_t i = 0; spec_.norm && i < x.size(); ++i) {
            x[i] = rounded_bf16(rounded_bf16(x[i] * scale) * bf16_to_f32(norm[i]));
        }
    }
    static void multiply_hadamard(std::vector<float>& x) {
        std::vector<double> sum(x.begin(), x.end());
        for (size_t bit = 1; bit < x.size(); bit *= 2) {
            for (size_t i = 0; i < x.size(); ++i) {
                if ((i & bit) == 0) {
                    const double a = sum[i];
                    sum[i] = a + sum[i + bit];
                    sum[i + bit] = a - sum[i + bit];
                }
            }
        }
        for (size_t i = 0; i < x.size(); ++i) {
            x[i] = rounded_bf16(static_cast<float>(sum[i] / std::sqrt(static_cast<double>(x.size()))));
        }
    }
    // A q or k head as it is stored.
    void finish(std::vector<float>& x, const uint16_t* norm, int32_t position) const {
        if (!spec_.norm_after_rope) {
            apply_norm(x, norm);
        }
        rotate(x, position);
        if (spec_.norm_after_rope) {
            apply_norm(x, norm);
        }
        if (spec_.hadamard) {
            multiply_hadamard(x);
        }
    }
    void rotate(std::vector<float>& x, int32_t position) const {
        const size_t half = x.size() / 2;
        const float* rope = rope_.data() + position * spec_.head_dim;
        for (size_t i = 0; i < half; ++i) {
            const float a = x[i];
            const float b = x[i + half];
            x[i] = rounded_bf16(a * rope[i] - b * rope[half + i]);
            x[i + half] = rounded_bf16(b * rope[i] + a * rope[half + i]);
        }
    }
    void reference(std::vector<float>& q, std::vector<float>& pages, std::vector<float>& k_scales) const {
        const int64_t d = spec_.head_dim;
        for (int64_t t = 0; t < spec_.tokens; ++t) {
            const int32_t position = positions_[static_cast<size_t>(t)];
            if (position < 0) {
                continue;
            }
            for (int64_t h = 0; h < spec_.q_heads + spec_.kv_heads; ++h) {
                std::vector<float> x = head(t, h);
                finish(x, norms_.data() + (h < spec_.q_heads ? 0 : d), position);
                if (h < spec_.q_heads) {
                    std::copy(x.begin(), x.end(), q.begin() + (t * spec_.q_heads + h) * d);
                    continue;
                }
                float scale = kKScale;
                const int64_t kv_head = h - spec_.q_heads;
                if (spec_.k_scales) {
                    scale = 0;
                    for (const float value : x) {
                        scale = std::fmax(scale, std::fabs(value) / 448);
                    }
                    k_scales[static_cast<size_t>(page(t) * spec_.kv_heads + kv_head) * 64 + slot(t)] = scale;
                }
                store(x, pages.begin() + place(t, 2, kv_head), scale);
                store(head(t, h + spec_.kv_heads), pages.begin() + place(t, 3, kv_head),
                      spec_.v_scales ? v_scales_[static_cast<size_t>(kv_head)] : kVScale);
            }
        }
    }
    void store(const std::vector<float>& x, std::vector<float>::iterator to, float scale) const {
        for (const float value : x) {
            *to++ = spec_.fp8 ? round_to_e4m3(value / scale) : value;
        }
    }
    size_t slot(int64_t token) const {
        return static_cast<size_t>(positions_[static_cast<size_t>(token)] + spec_.slot_shift) % 64;
    }
    int64_t page(int64_t token) const {
        const int64_t slot = positions_[static_cast<size_t>(token)] + spec_.slot_shift;
        return table_[static_cast<size_t>(token % 3 * max_pages_ + slot / 64)];
    }
    // Element of the pages: block 2 is the layer's K, 3 its V.
    int64_t place(int64_t token, int64_t block, int64_t kv_head) const {
        return page(token) * page_elements_ + block * block_ +
               (kv_head * 64 + static_cast<int64_t>(slot(token))) * spec_.head_dim;
    }

    QkvPostCudaSpec spec_;
    int64_t width_, block_, page_elements_, max_pages_;
    std::vector<float> rope_;
    std::vector<uint16_t> qkv_, norms_;
    std::vector<int32_t> positions_, sequences_, table_;
    std::unique_ptr<DeviceArray<uint16_t>> d_qkv_, d_q_, d_norms_;
    std::vector<float> v_scales_;
    std::unique_ptr<DeviceArray<float>> d_rope_, d_q_scale_, d_v_scales_;
    std::unique_ptr<DeviceArray<int32_t>> d_positions_, d_sequences_, d_table_;
    std::unique_ptr<DeviceArray<uint8_t>> d_pages_, d_q8_;
};

inline CudaOpCase qkv_post_cuda_case(const QkvPostCudaSpec& spec, bool bench) {
    const int64_t q = spec.tokens * spec.q_heads * spec.head_dim;
    const int64_t kv = spec.tokens * 2 * spec.kv_heads * spec.head_dim;
    const int64_t bytes = (spec.q_scales ? 3 : 4) * q + (spec.fp8 ? 3 : 4) * kv;
    return {fmt::format("tokens={} q_heads={} kv_heads={} head_dim={}{}{}{}{}{}{}{}", spec.tokens,
                        spec.q_heads, spec.kv_heads, spec.head_dim, spec.norm ? "" : " no norm",
                        spec.slot_shift != 0 ? " mtp" : "", spec.norm_after_rope ? " norm last" : "",
                        spec.hadamard ? " hadamard" : "", spec.q_scales ? " q8" : "",
                        spec.k_scales ? " k scales" : "", spec.v_scales ? " v scales" : ""),
            spec.fp8 ? "fp8_e4m3" : "bfloat16", bench,
            [=](const CudaCaseData& data) {
                auto run = std::make_shared<QkvPostCudaCase>(data, spec);
                return make_cuda_run(std::move(run), data.sets, {bytes, 10 * (q + kv)});
            },
            bytes};
}

inline std::vector<CudaOpCase> qkv_post_cuda_cases() {
    std::vector<CudaOpCase> cases;
    const auto add = [&](const QkvPostCudaSpec& spec, bool bench) {
        cases.push_back(qkv_post_cuda_case(spec, bench));
    };
    for (const bool fp8 : {false, true}) {
        add({1, 16, 2, 128, fp8}, false);
        add({9, 3, 1, 256, fp8}, false);
        add({63, 3, 1, 64, fp8}, false);
        add({129, 5, 3, 128, fp8, false}, false);
        add({65, 8, 1, 128, fp8, true, 1}, false);
        add({300, 7, 1, 256, fp8}, false);
        add({301, 20, 3, 64, fp8}, false);
        add({2100, 30, 3, 128, fp8}, false);
        add({65, 5, 2, 128, fp8, true, 0, true}, false);
        add({66, 5, 2, 128, fp8, true, 0, false, true, true}, false);
        add({300, 33, 3, 128, fp8, true, 0, true, true, true}, false);
        for (const int64_t tokens : {64, 2048, 4096}) {
            add({tokens, 64, 8, 128, fp8}, true);
        }
        add({64, 8, 1, 128, fp8}, true);
        add({2048, 8, 1, 128, fp8}, true);
        add({64, 64, 8, 128, fp8, true, 0, false, true}, true);
        add({2048, 64, 8, 128, fp8, true, 0, false, true}, true);
    }
    add({65, 9, 3, 128, true, true, 0, false, false, false, true, true}, false);
    add({270, 6, 2, 64, true, true, 1, true, false, true, true, true}, false);
    for (const int64_t tokens : {64, 2048}) {
        add({tokens, 64, 8, 128, true, true, 0, false, false, true}, true);
        add({tokens, 64, 8, 128, true, true, 0, false, true, true, true, true}, true);
    }
    return cases;
}

}  // namespace tessera

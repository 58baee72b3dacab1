// The cases of qkv_post on the device.
#pragma once

#include <algorithm>
#include <cstring>
#include <fmt/format.h>
#include <numeric>

#include "ops/cuda/cuda_case.h"
#include "ops/qkv_post/cuda/qkv_post_cuda.h"
#include "ops/qkv_post/cuda/qkv_post_cuda_reference.h"

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
        const int64_t page_count = 3 * max_pages_ + 1;
        int64_t step = 7;
        while (std::gcd(step, page_count) != 1) {
            ++step;
        }
        for (int64_t p = 0; p < page_count - 1; ++p) {  // pages in no order, each once
            table_.push_back(static_cast<int32_t>((p * step + 3) % page_count));
        }
        for (int64_t h = 0; h < spec.kv_heads; ++h) {
            v_scales_.push_back(0.01f * static_cast<float>(h + 2));
        }
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
                               .eps = kEps,
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
        const int64_t page_count = 3 * max_pages_ + 1;
        Expected want{OutputRange(spec_.tokens * spec_.q_heads * spec_.head_dim),
                      OutputRange(spec_.tokens * spec_.q_heads), OutputRange(page_count * page_elements_),
                      OutputRange(page_count * spec_.kv_heads * 64)};
        reference(want);
        OpError error = compare_range(
            spec_.q_scales ? widen_e4m3(d_q8_->download()) : widen_bf16(d_q_->download()), want.q);
        if (spec_.q_scales) {
            error += compare_range(d_q_scale_->download(), want.q_scales);
        }
        std::vector<float> got = device_pages();
        if (spec_.k_scales) {
            error += compare_range(take_scales(got), want.k_scales);
        }
        error += compare_range(got, want.pages);
        return error;
    }

  private:
    static constexpr float kKScale = 0.05f;
    static constexpr float kVScale = 0.02f;
    static constexpr float kEps = 1e-5f;

    int64_t element() const { return spec_.fp8 ? 1 : 2; }
    int64_t scales_place() const { return (4 * block_ + 64) * element(); }

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
    // A q or k head as it is before quantisation.
    HeadRange finished(int64_t token, int64_t head_index) const {
        const auto dim = static_cast<size_t>(spec_.head_dim);
        HeadRange x = exact_head(head(token, head_index));
        const auto norm = [&] {
            if (spec_.norm) {
                const size_t first = head_index < spec_.q_heads ? 0 : dim;
                range_norm(x, widen_bf16({norms_.data() + first, dim}), static_cast<double>(kEps));
            }
        };
        if (!spec_.norm_after_rope) {
            norm();
        }
        range_rotate(x, {rope_.data() + positions_[static_cast<size_t>(token)] * spec_.head_dim, dim});
        if (spec_.norm_after_rope) {
            norm();
        }
        if (spec_.hadamard) {
            range_hadamard(x);
        }
        return x;
    }
    struct Expected {
        OutputRange q, q_scales, pages, k_scales;
    };
    void reference(Expected& want) const {
        for (int64_t t = 0; t < spec_.tokens; ++t) {
            if (positions_[static_cast<size_t>(t)] < 0) {
                continue;
            }
            for (int64_t h = 0; h < spec_.q_heads; ++h) {
                const HeadRange x = finished(t, h);
                const ValueRange scale = range_scale(x);
                if (spec_.q_scales) {
                    want.q_scales.set(t * spec_.q_heads + h, scale);
                }
                store(x, want.q, (t * spec_.q_heads + h) * spec_.head_dim,
                      {spec_.q_scales, scale, kOwnScaleError});
            }
            for (int64_t h = 0; h < spec_.kv_heads; ++h) {
                const HeadRange x = finished(t, spec_.q_heads + h);
                ValueRange scale{kKScale, kKScale};
                if (spec_.k_scales) {
                    scale = range_scale(x);
                    want.k_scales.set((page(t) * spec_.kv_heads + h) * 64 + slot(t), scale);
                }
                store(x, want.pages, place(t, 2, h), {spec_.fp8, scale, spec_.k_scales ? kOwnScaleError : 0});
                const float v_scale = spec_.v_scales ? v_scales_[static_cast<size_t>(h)] : kVScale;
                store(exact_head(head(t, spec_.q_heads + spec_.kv_heads + h)), want.pages, place(t, 3, h),
                      {spec_.fp8, {v_scale, v_scale}});
            }
        }
    }
    struct Format {
        bool fp8 = false;
        ValueRange scale;
        double error = 0;  // of the quotient by it
    };
    static void store(const HeadRange& x, OutputRange& to, int64_t first, const Format& format) {
        for (const ValueRange& value : x) {
            to.set(first++, format.fp8 ? range_e4m3(value, format.scale, format.error) : value);
        }
    }
    int64_t slot(int64_t token) const {
        return (positions_[static_cast<size_t>(token)] + spec_.slot_shift) % 64;
    }
    int64_t page(int64_t token) const {
        const int64_t slot = positions_[static_cast<size_t>(token)] + spec_.slot_shift;
        return table_[static_cast<size_t>(token % 3 * max_pages_ + slot / 64)];
    }
    // Element of the pages: block 2 is the layer's K, 3 its V.
    int64_t place(int64_t token, int64_t block, int64_t kv_head) const {
        return page(token) * page_elements_ + block * block_ + (kv_head * 64 + slot(token)) * spec_.head_dim;
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
        // Many tokens: a thread makes the same head of several.
        add({1300, 12, 4, 128, fp8, false, 1}, false);
        add({1300, 9, 3, 128, fp8, true, 0, false, true, true}, false);
        add({1700, 7, 1, 256, fp8}, false);
        add({2500, 5, 2, 64, fp8}, false);
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
    add({1301, 9, 2, 128, true, true, 1, false, false, true, true, true}, false);
    add({1301, 9, 2, 128, true, true, 1, false, true, true, true, true}, false);
    for (const int64_t tokens : {64, 2048}) {
        add({tokens, 64, 8, 128, true, true, 0, false, false, true}, true);
        add({tokens, 64, 8, 128, true, true, 0, false, true, true, true, true}, true);
    }
    return cases;
}

}  // namespace tessera

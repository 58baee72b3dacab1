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
    bool in_place = false;  // q_out is q, as in the engine
    bool mixed = false;     // a step of decode rows, rows with drafts and prefills
    bool batch_invariant = false;
    float spread = 3;  // of q, k and v
    float eps = 1e-5f;
};

// Tokens belong to three sequences in turn or to the requests of a mixed step, at positions that cross pages;
// token 1 is padding. q, k and v lie in one row, as a fused projection writes them. Pages hold two layers, of
// which the second is written.
class QkvPostCudaCase {
  public:
    QkvPostCudaCase(const CudaCaseData& data, const QkvPostCudaSpec& spec)
        : spec_(spec),
          width_((spec.q_heads + 2 * spec.kv_heads) * spec.head_dim),
          block_(spec.kv_heads * 64 * spec.head_dim),
          page_elements_(4 * block_ + 64 + spec.kv_heads * 256) {
        OpRandom random(data.seed);
        qkv_ = random_bf16(random, spec.tokens * width_, spec.spread);
        norms_ = random_bf16(random, 2 * spec.head_dim, 2);
        place_tokens();
        const int64_t positions = *std::max_element(positions_.begin(), positions_.end()) + 1;
        rope_ = rope_table(positions, spec.head_dim, 11158840.0);
        max_pages_ = (positions + spec.slot_shift + 63) / 64;
        int64_t step = 7;
        while (std::gcd(step, page_count()) != 1) {
            ++step;
        }
        for (int64_t p = 0; p < page_count() - 1; ++p) {  // pages in no order, each once
            table_.push_back(static_cast<int32_t>((p * step + 3) % page_count()));
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
            data.budget, std::vector<uint8_t>(static_cast<size_t>(page_count() * page_elements_ * element())),
            data.sets);
    }

    void launch(cudaStream_t stream, int set) { launch(stream, set, spec_.tokens); }
    OpError check(cudaStream_t stream) {
        reset();
        launch(stream, 0);
        Expected want{{spec_.tokens * q_stride(), spec_.q_scales ? kE4m3LastPlace : kBf16LastPlace},
                      {spec_.tokens * spec_.q_heads, kScaleLastPlace},
                      {page_count() * page_elements_, spec_.fp8 ? kE4m3LastPlace : kBf16LastPlace},
                      {page_count() * spec_.kv_heads * 64, kScaleLastPlace}};
        reference(want);
        OpError error =
            compare_range(spec_.q_scales ? widen_e4m3(d_q8_->download()) : widen_bf16(q_bits()), want.q);
        if (spec_.q_scales) {
            error += compare_range(d_q_scale_->download(), want.q_scales);
        }
        std::vector<float> got = device_pages();
        if (spec_.k_scales) {
            error += compare_range(take_scales(got), want.k_scales);
        }
        error += compare_range(got, want.pages);
        if (spec_.batch_invariant) {
            error += check_first_tokens(stream);
        }
        return error;
    }

  private:
    static constexpr float kKScale = 0.05f;
    static constexpr float kVScale = 0.02f;

    // Requests of one token, of as many as two to four, and two prefills for the rest.
    void place_tokens() {
        constexpr int64_t kFirst[] = {1, 1, 3, 1, 2, 4, 1, 1};
        int32_t sequence = -1;
        int64_t left = 0;
        int32_t position = 0;
        for (int64_t t = 0; t < spec_.tokens; ++t) {
            if (spec_.mixed && left == 0) {
                ++sequence;
                const bool prefill = sequence >= static_cast<int32_t>(std::size(kFirst));
                left = prefill ? std::max<int64_t>(spec_.tokens / 2, 1) : kFirst[sequence];
                position = 61 + 37 * sequence;
            }
            --left;
            positions_.push_back(spec_.mixed ? position++ : static_cast<int32_t>(t / 3 + 63));
            sequences_.push_back(spec_.mixed ? sequence : static_cast<int32_t>(t % 3));
        }
        sequence_count_ = spec_.mixed ? sequence + 1 : 3;
        if (spec_.tokens > 1) {
            positions_[1] = -1;
        }
    }
    void reset() {
        d_q_->poison();
        d_q8_->poison();
        d_q_scale_->poison();
        d_pages_->poison();
        d_qkv_->upload(qkv_);
    }
    // The first tokens alone have the bits that they have among all.
    OpError check_first_tokens(cudaStream_t stream) {
        const std::vector<uint16_t> q = q_bits();
        const std::vector<uint8_t> pages = d_pages_->download();
        OpError error;
        for (const int64_t tokens : {int64_t{1}, std::min<int64_t>(7, spec_.tokens)}) {
            reset();
            launch(stream, 0, tokens);
            const std::vector<uint16_t> some_q = q_bits();
            const std::vector<uint8_t> some_pages = d_pages_->download();
            error.mismatches +=
                std::equal(q.begin(), q.begin() + tokens * q_stride(), some_q.begin()) ? 0 : 1;
            for (size_t i = 0; i < pages.size(); ++i) {
                const bool written = some_pages[i] != 0xFF;
                error.mismatches += written && some_pages[i] != pages[i] ? 1 : 0;
                error.compared += written ? 1 : 0;
            }
        }
        return error;
    }
    int64_t page_count() const { return sequence_count_ * max_pages_ + 1; }
    int64_t q_stride() const { return spec_.in_place ? width_ : spec_.q_heads * spec_.head_dim; }
    std::vector<uint16_t> q_bits() const { return spec_.in_place ? d_qkv_->download() : d_q_->download(); }

    void launch(cudaStream_t stream, int set, int64_t tokens) {
        const auto* qkv = reinterpret_cast<const __nv_bfloat16*>(d_qkv_->at(set));
        auto* q_out = spec_.in_place ? d_qkv_->at(set) : d_q_->at(set);
        const auto* norms = reinterpret_cast<const __nv_bfloat16*>(d_norms_->at(0));
        qkv_post_cuda(stream, {.tokens = tokens,
                               .q_heads = spec_.q_heads,
                               .kv_heads = spec_.kv_heads,
                               .head_dim = spec_.head_dim,
                               .q = qkv,
                               .k = qkv + spec_.q_heads * spec_.head_dim,
                               .v = qkv + (spec_.q_heads + spec_.kv_heads) * spec_.head_dim,
                               .q_stride = width_,
                               .kv_stride = width_,
                               .q_out = reinterpret_cast<__nv_bfloat16*>(q_out),
                               .q_out_stride = q_stride(),
                               .q_norm = spec_.norm ? norms : nullptr,
                               .k_norm = spec_.norm ? norms + spec_.head_dim : nullptr,
                               .eps = spec_.eps,
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
                               .q8_scale = d_q_scale_->at(set),
                               .batch_invariant = spec_.batch_invariant});
    }
    int64_t element() const { return spec_.fp8 ? 1 : 2; }
    int64_t scales_place() const { return (4 * block_ + 64) * element(); }

    // The K scales out of the pages' bytes, which become NaN.
    std::vector<float> take_scales(std::vector<float>& pages) const {
        const std::vector<uint8_t> bytes = d_pages_->download();
        const auto count = static_cast<size_t>(spec_.kv_heads * 64);
        std::vector<float> out;
        for (int64_t p = 0; p < page_count(); ++p) {
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
    ValueRanges finished(int64_t token, int64_t head_index) const {
        const auto dim = static_cast<size_t>(spec_.head_dim);
        ValueRanges x = exact_ranges(head(token, head_index));
        const auto norm = [&] {
            if (spec_.norm) {
                const size_t first = head_index < spec_.q_heads ? 0 : dim;
                range_norm(x, widen_bf16({norms_.data() + first, dim}), static_cast<double>(spec_.eps),
                           kHeadNormError);
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
            const bool padding = positions_[static_cast<size_t>(t)] < 0;
            for (int64_t h = padding ? 0 : spec_.q_heads; spec_.in_place && h * spec_.head_dim < width_;
                 ++h) {
                want.q.set(t * width_ + h * spec_.head_dim, exact_ranges(head(t, h)));
            }
            if (padding) {
                continue;
            }
            for (int64_t h = 0; h < spec_.q_heads; ++h) {
                const ValueRanges x = finished(t, h);
                const ValueRange scale = range_scale(x);
                if (spec_.q_scales) {
                    want.q_scales.set(t * spec_.q_heads + h, scale);
                }
                store(x, want.q, t * q_stride() + h * spec_.head_dim,
                      {spec_.q_scales, scale, kOwnScaleError});
            }
            for (int64_t h = 0; h < spec_.kv_heads; ++h) {
                const ValueRanges x = finished(t, spec_.q_heads + h);
                ValueRange scale{kKScale, kKScale};
                if (spec_.k_scales) {
                    scale = range_scale(x);
                    want.k_scales.set((page(t) * spec_.kv_heads + h) * 64 + slot(t), scale);
                }
                store(x, want.pages, place(t, 2, h), {spec_.fp8, scale, spec_.k_scales ? kOwnScaleError : 0});
                const float v_scale = spec_.v_scales ? v_scales_[static_cast<size_t>(h)] : kVScale;
                store(exact_ranges(head(t, spec_.q_heads + spec_.kv_heads + h)), want.pages, place(t, 3, h),
                      {spec_.fp8, {v_scale, v_scale}});
            }
        }
    }
    struct Format {
        bool fp8 = false;
        ValueRange scale;
        double error = 0;  // of the quotient by it
    };
    static void store(ValueRanges x, OutputRange& to, int64_t first, const Format& format) {
        for (ValueRange& value : x) {
            value = format.fp8 ? range_e4m3(value, format.scale, format.error) : value;
        }
        to.set(first, x);
    }
    int64_t slot(int64_t token) const {
        return (positions_[static_cast<size_t>(token)] + spec_.slot_shift) % 64;
    }
    int64_t page(int64_t token) const {
        const int64_t slot = positions_[static_cast<size_t>(token)] + spec_.slot_shift;
        return table_[static_cast<size_t>(sequences_[static_cast<size_t>(token)] * max_pages_ + slot / 64)];
    }
    // Element of the pages: block 2 is the layer's K, 3 its V.
    int64_t place(int64_t token, int64_t block, int64_t kv_head) const {
        return page(token) * page_elements_ + block * block_ + (kv_head * 64 + slot(token)) * spec_.head_dim;
    }

    QkvPostCudaSpec spec_;
    int64_t width_, block_, page_elements_;
    int64_t max_pages_ = 0;  // of a sequence
    int64_t sequence_count_ = 0;
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
    std::string shape = fmt::format("tokens={} q_heads={} kv_heads={} head_dim={}", spec.tokens, spec.q_heads,
                                    spec.kv_heads, spec.head_dim);
    const auto note = [&](bool has, std::string_view text) { shape += has ? text : std::string_view(); };
    note(!spec.norm, " no norm");
    note(spec.slot_shift != 0, " mtp");
    note(spec.norm_after_rope, " norm last");
    note(spec.hadamard, " hadamard");
    note(spec.q_scales, " q8");
    note(spec.k_scales, " k scales");
    note(spec.v_scales, " v scales");
    note(spec.in_place, " in place");
    note(spec.mixed, " mixed");
    note(spec.batch_invariant, " invariant");
    note(spec.eps > 1e-4f, " near zero");
    return {shape, spec.fp8 ? "fp8_e4m3" : "bfloat16", bench,
            [=](const CudaCaseData& data) {
                auto run = std::make_shared<QkvPostCudaCase>(data, spec);
                return make_cuda_run(std::move(run), data.sets, {bytes, 10 * (q + kv)});
            },
            bytes};
}

// What the engine asks for: heads of whole and of split models, q in place, batches of every kind.
inline void add_engine_cases(std::vector<CudaOpCase>& cases, bool fp8) {
    const auto add = [&](QkvPostCudaSpec spec) {
        spec.fp8 = fp8;
        cases.push_back(qkv_post_cuda_case(spec, false));
    };
    for (const int64_t tokens : {1, 4, 64, 400, 1000}) {
        add({.tokens = tokens, .q_heads = 32, .kv_heads = 4});
        add({.tokens = tokens, .q_heads = 16, .kv_heads = 2, .in_place = true});
    }
    add({.tokens = 1000, .q_heads = 32, .kv_heads = 4, .hadamard = true, .q_scales = fp8});
    add({.tokens = 64, .q_heads = 64, .kv_heads = 8, .in_place = true});
    for (const int64_t tokens : {100, 900}) {
        add({.tokens = tokens, .q_heads = 32, .kv_heads = 4, .in_place = true, .mixed = true});
        add({.tokens = tokens, .q_heads = 16, .kv_heads = 2, .slot_shift = 1, .mixed = true});
        add({.tokens = tokens,
             .q_heads = 32,
             .kv_heads = 4,
             .in_place = true,
             .mixed = true,
             .batch_invariant = true});
        add({.tokens = tokens, .q_heads = 16, .kv_heads = 2, .hadamard = true, .batch_invariant = true});
        add({.tokens = tokens, .q_heads = 16, .kv_heads = 2, .spread = 0.05f, .eps = 1e-2f});
        add({.tokens = tokens, .q_heads = 8, .kv_heads = 1, .hadamard = true, .spread = 0.05f, .eps = 1e-2f});
        add({.tokens = tokens,
             .q_heads = 8,
             .kv_heads = 1,
             .norm_after_rope = true,
             .spread = 0.05f,
             .eps = 1e-2f});
    }
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
        add_engine_cases(cases, fp8);
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

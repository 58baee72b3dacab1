// What qkv_post writes is what decode attention reads: e4m3 pages with each form of scales, from the raw
// projections to attention's output.
#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <gtest/gtest.h>
#include <numeric>
#include <random>
#include <vector>

#include "device/cuda/stream.h"
#include "ops/attention/cuda/attention_cuda.h"
#include "ops/common/cuda/device_testing.h"
#include "ops/qkv_post/cuda/qkv_post_cuda.h"

namespace tessera {
namespace {

constexpr int64_t kHeadDim = 128;
constexpr int64_t kSlots = 64;
constexpr double kTheta = 11158840.0;
constexpr float kEps = 1e-5f;

struct Form {
    AttentionCudaShape heads;
    bool k_scales = false;  // one for each token and head
    bool v_scales = false;  // one for each head
    bool hadamard = false;
    int32_t first_slot = 0;
};

// Sequences of a prompt and one new token. Pages in no order hold two layers, as PageFormat has them, of
// which the second is used; what nobody writes is NaN.
class Pages {
  public:
    explicit Pages(const Form& form)
        : form_(form), random_(static_cast<uint32_t>(form.heads.q_heads + form.first_slot)) {
        const auto sequences = static_cast<int32_t>(prompts_.size());
        for (int32_t b = 0; b < sequences; ++b) {
            for (int32_t position = 0; position < prompts_[static_cast<size_t>(b)]; ++position) {
                tokens_.push_back({b, position});
            }
        }
        for (int32_t b = 0; b < sequences; ++b) {  // the new ones are the last
            tokens_.push_back({b, prompts_[static_cast<size_t>(b)]});
        }
        std::normal_distribution<float> normal(0, 1);
        for (size_t i = 0; i < tokens_.size() * static_cast<size_t>(width()); ++i) {
            // Heads of different sizes, so that a wrong scale shows.
            const float size = 0.5f + static_cast<float>(i / kHeadDim % 5);
            raw_.push_back(f32_to_bf16(normal(random_) * size));
        }
        for (int64_t i = 0; i < 2 * kHeadDim; ++i) {
            norms_.push_back(f32_to_bf16(1 + 0.3f * normal(random_)));
        }
        for (int32_t head = 0; head < form.heads.kv_heads; ++head) {
            v_scales_.push_back(0.06f * static_cast<float>(head + 1));
        }
        table_.resize(prompts_.size() * kPagesMax);
        std::iota(table_.begin(), table_.end(), 0);
        std::shuffle(table_.begin(), table_.end(), random_);
        rope_ = rope_table(1024, kHeadDim, kTheta);
        upload();
    }

    // [sequences, q_heads * 128]: of the new tokens.
    std::vector<float> attend() {
        const auto sequences = static_cast<int64_t>(prompts_.size());
        const auto prompt_tokens = static_cast<int64_t>(tokens_.size()) - sequences;
        Stream stream;
        post(stream.get(), 0, prompt_tokens);
        DecodePlanCudaArgs plan{.shape = form_.heads,
                                .positions = arena_.upload(prompts_),
                                .batch = static_cast<int32_t>(sequences),
                                .first_slot = form_.first_slot,
                                .slots_max = kPagesMax * 64,
                                .sm_count = device_sm_count()};
        plan.workspace = arena_.poisoned<std::byte>(decode_cuda_workspace_bytes(plan));
        uint16_t* out = arena_.poisoned<uint16_t>(sequences * q_width());
        decode_plan_cuda(stream.get(), plan);
        post(stream.get(), prompt_tokens, sequences);
        attention_decode_cuda(stream.get(), {.plan = plan,
                                             .kv = {.pool = pool_,
                                                    .page_stride = page_bytes(),
                                                    .k_offset = layer_bytes(),
                                                    .v_offset = layer_bytes() + block_bytes(),
                                                    .dtype = DType::kFloat8E4M3,
                                                    .k_scale = kKScale,
                                                    .v_scale = kVScale,
                                                    .k_scales_offset = form_.k_scales ? scales_place() : -1,
                                                    .v_scales = form_.v_scales ? d_v_scales_ : nullptr,
                                                    .page_tables = d_table_,
                                                    .pages_max = kPagesMax},
                                             .q = q_ + prompt_tokens * q_width(),
                                             .q_stride = q_width(),
                                             .out = out,
                                             .out_stride = q_width(),
                                             .scale = kScale,
                                             .settled = true});
        stream.synchronize();
        return bf16_values(DeviceArena::download(out, sequences * q_width()));
    }

    // stored: with q, K and V as the device has stored them; otherwise from the raw projections, nothing
    // rounded. The Hadamard matrix changes no score.
    std::vector<double> reference(bool stored) const {
        const auto sequences = static_cast<int64_t>(prompts_.size());
        const auto first = static_cast<int64_t>(tokens_.size()) - sequences;
        const std::vector<uint8_t> pool =
            DeviceArena::download(reinterpret_cast<const uint8_t*>(pool_), pool_bytes());
        const std::vector<float> q =
            bf16_values(DeviceArena::download(q_, static_cast<int64_t>(tokens_.size()) * q_width()));
        const int64_t group = form_.heads.q_heads / form_.heads.kv_heads;
        std::vector<double> out;
        for (int64_t b = 0; b < sequences; ++b) {
            for (int64_t head = 0; head < form_.heads.q_heads; ++head) {
                std::vector<double> query = turned(first + b, head);
                if (stored) {
                    const float* from = q.data() + (first + b) * q_width() + head * kHeadDim;
                    query.assign(from, from + kHeadDim);
                }
                const std::vector<double> row = mix(b, query, head / group, stored ? &pool : nullptr);
                out.insert(out.end(), row.begin(), row.end());
            }
        }
        return out;
    }

  private:
    struct Token {
        int32_t sequence = 0;
        int32_t position = 0;
    };
    static constexpr int32_t kPagesMax = 12;
    static constexpr float kKScale = 0.02f;
    static constexpr float kVScale = 0.06f;
    static constexpr float kScale = 0.08838834764831845f;  // 1 / sqrt(128)

    int64_t q_width() const { return form_.heads.q_heads * kHeadDim; }
    int64_t width() const { return (form_.heads.q_heads + 2 * form_.heads.kv_heads) * kHeadDim; }
    int64_t block_bytes() const { return form_.heads.kv_heads * kSlots * kHeadDim; }
    int64_t layer_bytes() const {
        return 2 * block_bytes() + (form_.k_scales ? form_.heads.kv_heads * kSlots * 4 : 0);
    }
    int64_t scales_place() const { return layer_bytes() + 2 * block_bytes(); }
    int64_t page_bytes() const { return 2 * layer_bytes() + 64; }
    int64_t pool_bytes() const { return static_cast<int64_t>(table_.size()) * page_bytes(); }

    void upload() {
        d_raw_ = arena_.upload(raw_);
        d_norms_ = arena_.upload(norms_);
        d_rope_ = arena_.upload(rope_);
        d_table_ = arena_.upload(table_);
        d_v_scales_ = arena_.upload(v_scales_);
        pool_ = arena_.poisoned<std::byte>(pool_bytes());
        q_ = arena_.poisoned<uint16_t>(static_cast<int64_t>(tokens_.size()) * q_width());
        std::vector<int32_t> positions, sequences;
        for (const Token& token : tokens_) {
            positions.push_back(token.position);
            sequences.push_back(token.sequence);
        }
        d_positions_ = arena_.upload(positions);
        d_sequences_ = arena_.upload(sequences);
    }

    void post(cudaStream_t stream, int64_t first, int64_t tokens) {
        const auto* raw = reinterpret_cast<const __nv_bfloat16*>(d_raw_) + first * width();
        const auto* norms = reinterpret_cast<const __nv_bfloat16*>(d_norms_);
        qkv_post_cuda(stream, {.tokens = tokens,
                               .q_heads = form_.heads.q_heads,
                               .kv_heads = form_.heads.kv_heads,
                               .head_dim = kHeadDim,
                               .q = raw,
                               .k = raw + q_width(),
                               .v = raw + q_width() + form_.heads.kv_heads * kHeadDim,
                               .q_stride = width(),
                               .kv_stride = width(),
                               .q_out = reinterpret_cast<__nv_bfloat16*>(q_) + first * q_width(),
                               .q_out_stride = q_width(),
                               .q_norm = norms,
                               .k_norm = norms + kHeadDim,
                               .eps = kEps,
                               .rope = d_rope_,
                               .positions = d_positions_ + first,
                               .slot_shift = form_.first_slot,
                               .sequences = d_sequences_ + first,
                               .page_table = d_table_,
                               .page_table_stride = kPagesMax,
                               .pages = pool_,
                               .page_stride = page_bytes(),
                               .k_offset = layer_bytes(),
                               .v_offset = layer_bytes() + block_bytes(),
                               .kv_dtype = DType::kFloat8E4M3,
                               .k_scale = kKScale,
                               .v_scale = kVScale,
                               .v_head_scale = form_.v_scales ? d_v_scales_ : nullptr,
                               .k_scale_offset = form_.k_scales ? scales_place() : -1,
                               .hadamard = form_.hadamard});
    }

    std::vector<double> raw(int64_t token, int64_t head) const {
        std::vector<double> out;
        for (int64_t d = 0; d < kHeadDim; ++d) {
            out.push_back(bf16_to_f32(raw_[static_cast<size_t>(token * width() + head * kHeadDim + d)]));
        }
        return out;
    }
    // A q or k head after norm and rotation.
    std::vector<double> turned(int64_t token, int64_t head) const {
        std::vector<double> x = raw(token, head);
        double sum = 0;
        for (const double value : x) {
            sum += value * value;
        }
        const double factor = 1 / std::sqrt(sum / kHeadDim + static_cast<double>(kEps));
        const size_t weights = head < form_.heads.q_heads ? 0 : kHeadDim;
        for (size_t d = 0; d < kHeadDim; ++d) {
            x[d] *= factor * static_cast<double>(bf16_to_f32(norms_[weights + d]));
        }
        const float* angles =
            rope_.data() + tokens_[static_cast<size_t>(token)].position * kHeadDim;  // cosines, then sines
        for (size_t d = 0; d < kHeadDim / 2; ++d) {
            const double a = x[d];
            const double b = x[d + kHeadDim / 2];
            x[d] = a * static_cast<double>(angles[d]) - b * static_cast<double>(angles[kHeadDim / 2 + d]);
            x[d + kHeadDim / 2] =
                b * static_cast<double>(angles[d]) + a * static_cast<double>(angles[kHeadDim / 2 + d]);
        }
        return x;
    }
    // As the page has it. block 0: K, 1: V.
    std::vector<double> loaded(const std::vector<uint8_t>& pool, int64_t token, int64_t kv_head,
                               int64_t block) const {
        const Token& of = tokens_[static_cast<size_t>(token)];
        const int64_t slot = of.position + form_.first_slot;
        const int64_t page = table_[static_cast<size_t>(of.sequence * kPagesMax + slot / kSlots)];
        const int64_t at = page * page_bytes() + layer_bytes() + block * block_bytes() +
                           (kv_head * kSlots + slot % kSlots) * kHeadDim;
        float scale = block == 0 ? kKScale : kVScale;
        if (block == 0 && form_.k_scales) {
            std::memcpy(
                &scale,
                pool.data() + page * page_bytes() + scales_place() + (kv_head * kSlots + slot % kSlots) * 4,
                sizeof(scale));
        } else if (block == 1 && form_.v_scales) {
            scale = v_scales_[static_cast<size_t>(kv_head)];
        }
        std::vector<double> out;
        for (int64_t d = 0; d < kHeadDim; ++d) {
            out.push_back(static_cast<double>(e4m3_to_f32(pool[static_cast<size_t>(at + d)])) *
                          static_cast<double>(scale));
        }
        return out;
    }
    // pool: or null.
    std::vector<double> mix(int64_t sequence, const std::vector<double>& query, int64_t kv_head,
                            const std::vector<uint8_t>* pool) const {
        const int64_t heads = form_.heads.q_heads;
        std::vector<double> out(kHeadDim);
        double sum = 0;
        for (int64_t token = 0; token < static_cast<int64_t>(tokens_.size()); ++token) {
            if (tokens_[static_cast<size_t>(token)].sequence != sequence) {
                continue;
            }
            const std::vector<double> key =
                pool != nullptr ? loaded(*pool, token, kv_head, 0) : turned(token, heads + kv_head);
            const std::vector<double> value = pool != nullptr
                                                  ? loaded(*pool, token, kv_head, 1)
                                                  : raw(token, heads + form_.heads.kv_heads + kv_head);
            // Scores are small, norms being near 1.
            const double weight = std::exp(std::inner_product(query.begin(), query.end(), key.begin(), 0.0) *
                                           static_cast<double>(kScale));
            sum += weight;
            for (size_t d = 0; d < kHeadDim; ++d) {
                out[d] += weight * value[d];
            }
        }
        for (double& value : out) {
            value /= sum;
        }
        return out;
    }

    Form form_;
    std::mt19937 random_;
    // Tokens before the new one, which is also its position.
    std::vector<int32_t> prompts_ = {0, 1, 62, 63, 64, 130, 640};
    std::vector<Token> tokens_;
    std::vector<uint16_t> raw_, norms_;
    std::vector<int32_t> table_;
    std::vector<float> v_scales_, rope_;
    DeviceArena arena_;
    std::byte* pool_ = nullptr;
    uint16_t *d_raw_ = nullptr, *d_norms_ = nullptr, *q_ = nullptr;
    float *d_rope_ = nullptr, *d_v_scales_ = nullptr;
    int32_t *d_table_ = nullptr, *d_positions_ = nullptr, *d_sequences_ = nullptr;
};

TEST(KvPagesCuda, decode_reads_what_qkv_post_writes) {
    for (const AttentionCudaShape heads : {AttentionCudaShape{8, 1}, {16, 2}, {12, 3}}) {
        for (int forms = 0; forms < 8; ++forms) {
            const Form form{.heads = heads,
                            .k_scales = forms % 2 > 0,
                            .v_scales = forms / 2 % 2 > 0,
                            .hadamard = forms / 4 > 0,
                            .first_slot = (forms + heads.kv_heads) % 2};
            Pages pages(form);
            const std::vector<float> got = pages.attend();
            const double from_pages = relative_error(got, pages.reference(true));
            const double from_raw = relative_error(got, pages.reference(false));
            std::printf("%d/%d, K %s, V %s%s: error %.2e, with the rounding to e4m3 %.2e\n", heads.q_heads,
                        heads.kv_heads, form.k_scales ? "by token" : "by tensor",
                        form.v_scales ? "by head" : "by tensor", form.hadamard ? ", Hadamard" : "",
                        from_pages, from_raw);
            EXPECT_LT(from_pages, 5e-3);
            EXPECT_LT(from_raw, 6e-2);
        }
    }
}

}  // namespace
}  // namespace tessera

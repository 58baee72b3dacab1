// The cases of attention: shapes, and batches of sequences with pages scattered over a pool.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "ops/attention/attention.h"
#include "ops/op_case.h"

namespace tessera {

struct AttentionCaseSpec {
    AttentionShape shape{16, 2, 128};
    DType kv_dtype = DType::kFloat32;
    struct Sequence {
        int32_t q_len = 1;
        int32_t position = 0;
        int32_t first_slot = 0;
    };
    std::vector<Sequence> sequences;
    int threads = 2;  // the plan's
};

// Owns the pool, the page tables, q and out. Slots that no token has written hold NaN.
class AttentionCase {
  public:
    explicit AttentionCase(const AttentionCaseSpec& spec, uint64_t seed = 1) : spec_(spec) {
        OpRandom random(seed);
        const AttentionShape& s = spec.shape;
        block_ = s.kv_heads * kAttentionTile * s.head_dim;
        int32_t pages = 0;
        for (const auto& sequence : spec.sequences) {
            pages += page_count(sequence);
            tokens_ += sequence.q_len;
        }
        std::vector<int32_t> order(static_cast<size_t>(pages));
        for (size_t i = 0; i < order.size(); ++i) {
            order[i] = static_cast<int32_t>(i);
            std::swap(order[i], order[static_cast<size_t>(random.below(static_cast<int64_t>(i) + 1))]);
        }
        pool_.assign(static_cast<size_t>(pages * page_floats()), std::numeric_limits<float>::quiet_NaN());
        q_.resize(static_cast<size_t>(tokens_ * s.q_heads * s.head_dim));
        out_.resize(q_.size());
        random.fill(q_, 4);
        tables_.reserve(spec.sequences.size());
        int32_t used = 0;
        int32_t first = 0;
        for (const auto& sequence : spec.sequences) {
            const int32_t count = page_count(sequence);
            tables_.emplace_back(order.begin() + used, order.begin() + used + count);
            used += count;
            write_slots(sequence, tables_.back(), random);
            sequences_.push_back({.first = first,
                                  .q_len = sequence.q_len,
                                  .position = sequence.position,
                                  .first_slot = sequence.first_slot,
                                  .pages = tables_.back()});
            first += sequence.q_len;
        }
        plan_.build(s, sequences_, spec.threads);
        for (AttentionSequence last : sequences_) {
            const int32_t skip = std::max(0, last.q_len - kReferenceQueries);
            last.first += skip;
            last.position += skip;
            last.q_len -= skip;
            last_queries_.push_back(last);
        }
        last_plan_.build(s, last_queries_, spec.threads);
    }
    AttentionCase(const AttentionCase&) = delete;
    AttentionCase& operator=(const AttentionCase&) = delete;

    AttentionArgs args() { return args_for(plan_, q_.data(), out_.data()); }
    AttentionArgs args_for(const AttentionPlan& plan, const float* q, float* out) {
        const AttentionShape& s = spec_.shape;
        const int64_t element = dtype_size(spec_.kv_dtype);
        return {.plan = &plan,
                .q = q,
                .q_stride = s.q_heads * s.head_dim,
                .out = out,
                .out_stride = s.q_heads * s.head_dim,
                .pool = reinterpret_cast<const std::byte*>(pool_.data()),
                .page_stride = page_floats() * static_cast<int64_t>(sizeof(float)),
                .k_offset = 64,
                .v_offset = 64 + block_ * element,
                .kv_dtype = spec_.kv_dtype,
                .scale = 1.0f / std::sqrt(static_cast<float>(s.head_dim))};
    }
    // Runs both; the reference, which is slow, on the last queries of each sequence.
    OpError check(OpContext& context) {
        attention(context, args());
        const std::vector<float> got = out_;
        attention_ref(args_for(last_plan_, q_.data(), out_.data()));
        OpError error = compare(got, out_, 0);
        error.compared = 0;
        for (const AttentionSequence& last : last_queries_) {
            error.compared += last.q_len * row_floats();
        }
        return error;
    }
    std::span<const AttentionSequence> sequences() const { return sequences_; }
    std::span<const float> q() const { return q_; }
    std::vector<float>& out() { return out_; }
    int64_t row_floats() const { return spec_.shape.q_heads * spec_.shape.head_dim; }

    // Query-slot pairs of one head.
    int64_t pairs() const {
        int64_t pairs = 0;
        for (const auto& s : spec_.sequences) {
            pairs += int64_t{s.q_len} * s.position + int64_t{s.q_len} * (s.q_len + 1) / 2;
        }
        return pairs;
    }
    int64_t flops() const { return 4 * pairs() * row_floats(); }
    int64_t bytes() const {
        int64_t slots = 0;
        for (const auto& s : spec_.sequences) {
            slots += s.position + s.q_len;
        }
        return 2 * tokens_ * row_floats() * 4 +
               2 * slots * spec_.shape.kv_heads * spec_.shape.head_dim * dtype_size(spec_.kv_dtype);
    }

  private:
    static constexpr int32_t kReferenceQueries = 100;

    static int32_t page_count(const AttentionCaseSpec::Sequence& s) {
        return (s.first_slot + s.position + s.q_len + kAttentionTile - 1) / kAttentionTile;
    }
    // 64 bytes of something else before K and after V, as in a page of many layers.
    int64_t page_floats() const { return 16 + 2 * block_ + 16; }

    void write_slots(const AttentionCaseSpec::Sequence& s, const std::vector<int32_t>& table,
                     OpRandom& random) {
        for (int32_t slot = s.first_slot; slot < s.first_slot + s.position + s.q_len; ++slot) {
            for (int64_t i = 0; i < 2 * spec_.shape.kv_heads; ++i) {
                const int64_t page = table[static_cast<size_t>(slot / kAttentionTile)];
                float* base = pool_.data() + page * page_floats() + 16;
                const int64_t index = (i * kAttentionTile + slot % kAttentionTile) * spec_.shape.head_dim;
                for (int64_t d = 0; d < spec_.shape.head_dim; ++d) {
                    const float value = random.uniform();
                    if (spec_.kv_dtype == DType::kBFloat16) {
                        uint32_t bits = 0;
                        std::memcpy(&bits, &value, 4);
                        const uint16_t high = static_cast<uint16_t>(bits >> 16);
                        std::memcpy(reinterpret_cast<uint16_t*>(base) + index + d, &high, 2);
                    } else {
                        base[index + d] = value;
                    }
                }
            }
        }
    }

    AttentionCaseSpec spec_;
    int64_t block_ = 0;  // elements of K, or of V, in a page
    int64_t tokens_ = 0;
    std::vector<float> pool_;
    std::vector<float> q_;
    std::vector<float> out_;
    std::vector<std::vector<int32_t>> tables_;
    std::vector<AttentionSequence> sequences_;
    std::vector<AttentionSequence> last_queries_;
    AttentionPlan plan_;
    AttentionPlan last_plan_;
};

inline OpCase attention_case(std::string shape, const AttentionCaseSpec& spec, bool bench) {
    OpCase result;
    result.shape = std::move(shape);
    result.dtype = dtype_name(spec.kv_dtype);
    result.bench = bench;
    result.prepare = [spec] {
        auto data = std::make_shared<AttentionCase>(spec);
        OpCaseRun run;
        run.bytes = data->bytes();
        run.flops = data->flops();
        run.run = [data](OpContext& context) { attention(context, data->args()); };
        run.check = [data](OpContext& context) { return data->check(context); };
        return run;
    };
    return result;
}

// The batches that the engine really runs (bench), and the corners (tests only).
inline std::vector<OpCase> attention_cases() {
    std::vector<OpCase> cases;
    for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
        const AttentionShape demo{16, 2, 128};
        cases.push_back(attention_case("decode batch=1 context=128", {demo, dtype, {{1, 128}}}, true));
        cases.push_back(attention_case("decode batch=16 context=128",
                                       {demo, dtype, std::vector<AttentionCaseSpec::Sequence>(16, {1, 128})},
                                       true));
        cases.push_back(attention_case("decode batch=1 context=8192", {demo, dtype, {{1, 8191}}}, true));
        cases.push_back(attention_case("prefill tokens=2048", {demo, dtype, {{2048, 0}}}, true));
        cases.push_back(attention_case(
            "mixed: decode, short and chunked prefill, MTP",
            {demo, dtype, {{1, 0}, {1, 63}, {1, 64}, {1, 1500}, {70, 0}, {33, 100}, {5, 62, 1}, {1, 63, 1}}},
            false));
        cases.push_back(
            attention_case("head_dim=16 group=1", {{2, 2, 16}, dtype, {{20, 3}, {1, 130}}}, false));
        cases.push_back(
            attention_case("head_dim=80 group=5", {{10, 2, 80}, dtype, {{23, 50}, {1, 7}}}, false));
        cases.push_back(attention_case("head_dim=256 group=3", {{3, 1, 256}, dtype, {{40, 1000}}}, false));
    }
    return cases;
}

}  // namespace tessera

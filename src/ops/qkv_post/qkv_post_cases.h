// The cases of qkv_post.
#pragma once

#include <cstring>
#include <fmt/format.h>
#include <limits>
#include <memory>
#include <vector>

#include "ops/op_case.h"
#include "ops/qkv_post/qkv_post.h"

namespace tessera {

struct QkvPostCaseSpec {
    int64_t tokens = 1;
    int64_t q_heads = 16;
    int64_t kv_heads = 2;
    int64_t head_dim = 128;
    DType kv_dtype = DType::kFloat32;
    bool norm = true;
};

// Rows of q, k, v lie in one buffer, as a fused projection writes them; tokens go to slots 5, 6, ... of the
// pages.
class QkvPostCase {
  public:
    explicit QkvPostCase(const QkvPostCaseSpec& spec) : spec_(spec) {
        OpRandom random(3);
        width_ = (spec.q_heads + 2 * spec.kv_heads) * spec.head_dim;
        start_.resize(static_cast<size_t>(spec.tokens * width_));
        norms_.resize(static_cast<size_t>(2 * spec.head_dim));
        angles_.resize(static_cast<size_t>(spec.tokens * spec.head_dim));
        random.fill(start_, 3);
        random.fill(norms_, 2);
        random.fill(angles_);
        page_floats_ = 16 + 2 * spec.kv_heads * 64 * spec.head_dim;
        pages_.resize(static_cast<size_t>((spec.tokens + 5 + 63) / 64 * page_floats_));
    }

    // Fresh inputs and empty pages.
    QkvPostArgs args() {
        work_ = start_;
        std::fill(pages_.begin(), pages_.end(), std::numeric_limits<float>::quiet_NaN());
        targets_.clear();
        for (int64_t t = 0; t < spec_.tokens; ++t) {
            float* page = pages_.data() + (t + 5) / 64 * page_floats_;
            targets_.push_back({reinterpret_cast<std::byte*>(page), static_cast<int32_t>((t + 5) % 64)});
        }
        const int64_t half = spec_.tokens * spec_.head_dim / 2;
        const int64_t q_width = spec_.q_heads * spec_.head_dim;
        const int64_t kv_width = spec_.kv_heads * spec_.head_dim;
        return {.tokens = spec_.tokens,
                .q_heads = spec_.q_heads,
                .kv_heads = spec_.kv_heads,
                .head_dim = spec_.head_dim,
                .q = work_.data(),
                .q_stride = width_,
                .k = work_.data() + q_width,
                .k_stride = width_,
                .v = work_.data() + q_width + kv_width,
                .v_stride = width_,
                .q_norm = spec_.norm ? norms_.data() : nullptr,
                .k_norm = spec_.norm ? norms_.data() + spec_.head_dim : nullptr,
                .eps = 1e-5f,
                .cos = angles_.data(),
                .sin = angles_.data() + half,
                .targets = targets_.data(),
                .k_offset = 64,
                .v_offset = 64 + spec_.kv_heads * 64 * spec_.head_dim * dtype_size(spec_.kv_dtype),
                .kv_dtype = spec_.kv_dtype};
    }
    // q and the pages, as numbers.
    std::vector<float> result() const {
        std::vector<float> out = work_;
        if (spec_.kv_dtype == DType::kFloat32) {
            out.insert(out.end(), pages_.begin(), pages_.end());
            return out;
        }
        std::vector<uint16_t> halves(pages_.size() * 2);
        std::memcpy(halves.data(), pages_.data(), halves.size() * 2);
        out.insert(out.end(), halves.begin(), halves.end());
        return out;
    }
    std::vector<float>& start() { return start_; }

  private:
    QkvPostCaseSpec spec_;
    int64_t width_ = 0;
    int64_t page_floats_ = 0;
    std::vector<float> start_, work_, norms_, angles_, pages_;
    std::vector<KvTarget> targets_;
};

inline OpCase qkv_post_case(const QkvPostCaseSpec& spec, bool bench) {
    OpCase c;
    c.shape = fmt::format("tokens={} q_heads={} kv_heads={} head_dim={}{}", spec.tokens, spec.q_heads,
                          spec.kv_heads, spec.head_dim, spec.norm ? "" : " no norm");
    c.dtype = dtype_name(spec.kv_dtype);
    c.bench = bench;
    c.prepare = [spec] {
        auto data = std::make_shared<QkvPostCase>(spec);
        const QkvPostArgs args = data->args();
        OpCaseRun run;
        const int64_t kv = 2 * spec.kv_heads;
        run.bytes =
            spec.tokens * spec.head_dim * (8 * spec.q_heads + kv * (4 + dtype_size(spec.kv_dtype)) + 4);
        run.flops = spec.tokens * spec.head_dim * (spec.q_heads + spec.kv_heads) * 7;
        run.run = [data, args](OpContext& context) { qkv_post(context, args); };
        run.check = [data](OpContext& context) {
            qkv_post(context, data->args());
            const std::vector<float> got = data->result();
            qkv_post_ref(data->args());
            return compare(got, data->result(), 0);
        };
        return run;
    };
    return c;
}

inline std::vector<OpCase> qkv_post_cases() {
    std::vector<OpCase> cases;
    for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
        for (const int64_t tokens : {1, 16, 2048}) {
            cases.push_back(qkv_post_case({.tokens = tokens, .kv_dtype = dtype}, true));
        }
        cases.push_back(qkv_post_case({67, 3, 1, 16, dtype}, false));
        cases.push_back(qkv_post_case({9, 4, 2, 80, dtype}, false));
        cases.push_back(qkv_post_case({5, 2, 2, 512, dtype, false}, false));
    }
    return cases;
}

}  // namespace tessera

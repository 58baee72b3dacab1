#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
#include <vector>

#include "base/check.h"
#include "ops/attention/attention.h"
#include "ops/common/exp.h"

namespace tessera {
namespace {

struct RowState {
    float max = std::numeric_limits<float>::lowest();
    float sum = 0;
    std::vector<float> output;
};

// One (query, head): its scaled query and where its keys and values lie.
struct Row {
    const AttentionArgs& args;
    const AttentionSequence& sequence;
    std::vector<float> q;  // [head_dim]
    int64_t kv_head = 0;
    int32_t last_slot = 0;

    float load(int64_t block_offset, int32_t slot, int64_t d) const {
        const int64_t head_dim = static_cast<int64_t>(q.size());
        const int64_t page = sequence.pages[static_cast<size_t>(slot / kAttentionTile)];
        const std::byte* block = args.pool + page * args.page_stride + block_offset;
        const int64_t index = (kv_head * kAttentionTile + slot % kAttentionTile) * head_dim + d;
        if (args.kv_dtype == DType::kBFloat16) {
            const uint32_t bits = reinterpret_cast<const uint16_t*>(block)[index];
            return std::bit_cast<float>(bits << 16);
        }
        return reinterpret_cast<const float*>(block)[index];
    }

    // Adds the slots [begin, end) of one tile to the state.
    void add_tile(int32_t begin, int32_t end, RowState& state) const {
        const int64_t head_dim = static_cast<int64_t>(q.size());
        std::vector<float> p(static_cast<size_t>(end - begin));
        float max = state.max;
        for (int32_t slot = begin; slot < end; ++slot) {
            float even = 0;
            float odd = 0;
            for (int64_t d = 0; d < head_dim; d += 2) {
                even = std::fma(load(args.k_offset, slot, d), q[static_cast<size_t>(d)], even);
                odd = std::fma(load(args.k_offset, slot, d + 1), q[static_cast<size_t>(d) + 1], odd);
            }
            const float score = even + odd;
            p[static_cast<size_t>(slot - begin)] = score;
            max = score > max ? score : max;
        }
        const float alpha = exp_f32(state.max - max);
        state.max = max;
        float sum = 0;
        for (float& value : p) {
            value = exp_f32(value - max);
            sum += value;
        }
        state.sum = std::fma(state.sum, alpha, sum);
        for (int64_t d = 0; d < head_dim; ++d) {
            float out = state.output[static_cast<size_t>(d)] * alpha;
            for (int32_t slot = begin; slot < end; ++slot) {
                out = std::fma(p[static_cast<size_t>(slot - begin)], load(args.v_offset, slot, d), out);
            }
            state.output[static_cast<size_t>(d)] = out;
        }
    }

    RowState run_span(int32_t span) const {
        RowState state;
        state.output.assign(q.size(), 0.0f);
        const int32_t first_tile = span * kAttentionSpanTiles;
        for (int32_t tile = first_tile; tile < first_tile + kAttentionSpanTiles; ++tile) {
            const int32_t begin = std::max(tile * kAttentionTile, sequence.first_slot);
            const int32_t end = std::min((tile + 1) * kAttentionTile, last_slot + 1);
            if (begin < end) {
                add_tile(begin, end, state);
            }
        }
        return state;
    }

    void run(float* out) const {
        RowState total = run_span(0);
        for (int32_t span = 1; span * kAttentionSpanTiles * kAttentionTile <= last_slot; ++span) {
            const RowState part = run_span(span);
            const float max = part.max > total.max ? part.max : total.max;
            const float a = exp_f32(total.max - max);
            const float b = exp_f32(part.max - max);
            total.max = max;
            total.sum = std::fma(part.sum, b, total.sum * a);
            for (size_t d = 0; d < q.size(); ++d) {
                total.output[d] = std::fma(part.output[d], b, total.output[d] * a);
            }
        }
        const float inverse = 1.0f / total.sum;
        for (size_t d = 0; d < q.size(); ++d) {
            out[d] = total.output[d] * inverse;
        }
    }
};

}  // namespace

void attention_ref(const AttentionArgs& args) {
    check(args.kv_dtype == DType::kFloat32 || args.kv_dtype == DType::kBFloat16,
          "attention: kv_dtype must be float32 or bfloat16");
    const AttentionShape& shape = args.plan->shape();
    const int64_t group = shape.q_heads / shape.kv_heads;
    for (const AttentionSequence& sequence : args.plan->sequences()) {
        for (int32_t i = 0; i < sequence.q_len; ++i) {
            for (int64_t head = 0; head < shape.q_heads; ++head) {
                const int64_t token = sequence.first + i;
                const float* q = args.q + token * args.q_stride + head * shape.head_dim;
                Row row{.args = args,
                        .sequence = sequence,
                        .q = std::vector<float>(q, q + shape.head_dim),
                        .kv_head = head / group,
                        .last_slot = sequence.first_slot + sequence.position + i};
                for (float& value : row.q) {
                    value *= args.scale;
                }
                row.run(args.out + token * args.out_stride + head * shape.head_dim);
            }
        }
    }
}

}  // namespace tessera

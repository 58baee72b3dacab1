// The working memory of one attention item, carved from a thread's scratch. Private to this operator.
#pragma once

#include <algorithm>
#include <cstdint>

#include "ops/attention/attention.h"

namespace tessera {

// Rows (query, head of the group) that one item computes together, at most, unless one query's group is
// larger. 96 is two row groups of three AVX-512 vectors or four of AVX2, and q, output and one tile of K and
// V stay in the level-2 cache.
inline constexpr int64_t kAttentionBlockRows = 288;
inline constexpr int64_t kAttentionRowGroup = 48;  // rows whose scores are held at once, at most

inline int64_t attention_block_queries(const AttentionShape& shape) {
    return std::max<int64_t>(1, kAttentionBlockRows / (shape.q_heads / shape.kv_heads));
}
inline int64_t attention_rows_max(const AttentionShape& shape) {
    const int64_t group = shape.q_heads / shape.kv_heads;
    return (attention_block_queries(shape) * group + 15) / 16 * 16;
}
// The softmax state of `rows` rows: output [rows][head_dim], then sums [rows], then maxima [rows].
inline int64_t attention_state_floats(int64_t rows, int64_t head_dim) {
    return rows * (head_dim + 2);
}

struct AttentionState {
    float* output = nullptr;  // [rows][head_dim], not yet divided by the sum
    float* sum = nullptr;     // [rows]
    float* max = nullptr;     // [rows]

    static AttentionState at(float* memory, int64_t rows, int64_t head_dim) {
        return {memory, memory + rows * head_dim, memory + rows * head_dim + rows};
    }
};

struct AttentionScratch {
    float* q = nullptr;       // [row group][head_dim / 2][its rows][2]: scaled
    float* scores = nullptr;  // [64][row group]
    float* alpha = nullptr;   // [rows]: this tile's rescaling
    float* limit = nullptr;   // [rows]: the last slot that the row sees
    float* k = nullptr;       // [64][head_dim]: a tile widened to float32
    float* v = nullptr;
    float* state = nullptr;  // of the present span
    float* total = nullptr;  // of the spans before it

    static AttentionScratch at(float* memory, const AttentionShape& shape, int64_t* floats = nullptr) {
        const int64_t rows = attention_rows_max(shape);
        int64_t used = 0;
        const auto take = [&](int64_t count) {
            float* piece = memory == nullptr ? nullptr : memory + used;
            used += (count + 15) / 16 * 16;
            return piece;
        };
        AttentionScratch s;
        s.q = take(shape.head_dim * rows);
        s.scores = take(kAttentionTile * kAttentionRowGroup);
        s.alpha = take(rows);
        s.limit = take(rows);
        s.k = take(kAttentionTile * shape.head_dim);
        s.v = take(kAttentionTile * shape.head_dim);
        s.state = take(attention_state_floats(rows, shape.head_dim));
        s.total = take(attention_state_floats(rows, shape.head_dim));
        if (floats != nullptr) {
            *floats = used;
        }
        return s;
    }
};

}  // namespace tessera

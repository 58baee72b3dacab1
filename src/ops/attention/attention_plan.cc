#include <algorithm>
#include <fmt/format.h>

#include "base/check.h"
#include "ops/attention/attention.h"
#include "ops/attention/attention_scratch.h"

namespace tessera {
namespace {

int32_t span_count(const AttentionSequence& sequence, const AttentionItem& item) {
    const int32_t last_slot = sequence.first_slot + sequence.position + item.query + item.queries - 1;
    return last_slot / (kAttentionTile * kAttentionSpanTiles) + 1;
}

void check_sequence(const AttentionSequence& sequence) {
    check(sequence.q_len >= 1 && sequence.position >= 0,
          "attention: an empty sequence or a negative position");
    check(sequence.first_slot == 0 || sequence.first_slot == 1, "attention: first_slot must be 0 or 1");
    const int64_t slots = int64_t{sequence.first_slot} + sequence.position + sequence.q_len;
    check(slots <= static_cast<int64_t>(sequence.pages.size()) * kAttentionTile,
          "attention: the page table is shorter than the sequence");
}

int64_t scratch_bytes_of(int64_t floats, int threads) {
    return floats * threads * static_cast<int64_t>(sizeof(float));
}

}  // namespace

Status AttentionPlan::reserve(const AttentionShape& shape, int threads) {
    AttentionScratch::at(nullptr, shape, &scratch_floats_);
    Result<HostBuffer> scratch = HostBuffer::allocate(
        scratch_bytes_of(scratch_floats_, threads),
        fmt::format("the attention's workspaces of {} threads", threads), "lower --threads");
    if (!scratch.ok()) {
        return scratch.status();
    }
    scratch_ = scratch.take();
    return {};
}

void AttentionPlan::build(const AttentionShape& shape, std::span<const AttentionSequence> sequences,
                          int threads) {
    check(shape.kv_heads > 0 && shape.q_heads % shape.kv_heads == 0,
          "attention: kv_heads must divide q_heads");
    check(shape.head_dim > 0 && shape.head_dim % 16 == 0, "attention: head_dim must be a multiple of 16");
    shape_ = shape;
    sequences_ = sequences;
    items_.clear();
    merges_.clear();

    const int32_t block = static_cast<int32_t>(attention_block_queries(shape));
    int64_t total_cost = 0;
    for (size_t i = 0; i < sequences.size(); ++i) {
        const AttentionSequence& sequence = sequences[i];
        check_sequence(sequence);
        for (int32_t query = 0; query < sequence.q_len; query += block) {
            const int32_t queries = std::min(block, sequence.q_len - query);
            const int64_t cost = int64_t{queries} * (sequence.position + query + queries);
            for (int32_t head = 0; head < shape.kv_heads; ++head) {
                items_.push_back({.sequence = static_cast<int32_t>(i),
                                  .kv_head = head,
                                  .query = query,
                                  .queries = queries,
                                  .cost = cost});
                total_cost += cost;
            }
        }
    }

    // An item that is more than half of a thread's share is split into its spans.
    const int64_t group = shape.q_heads / shape.kv_heads;
    int64_t partial_floats = 0;
    const size_t whole_items = items_.size();
    for (size_t i = 0; i < whole_items; ++i) {
        const AttentionItem item = items_[i];
        const int32_t spans = span_count(sequences[static_cast<size_t>(item.sequence)], item);
        if (threads < 2 || spans < 2 || item.cost * 2 * threads <= total_cost) {
            continue;
        }
        AttentionItem merge = item;
        merge.span = spans;
        merge.partial = partial_floats;
        merges_.push_back(merge);
        for (int32_t span = 0; span < spans; ++span) {
            AttentionItem part = item;
            part.span = span;
            part.partial = partial_floats;
            part.cost = item.cost / spans;
            partial_floats += attention_state_floats(item.queries * group, shape.head_dim);
            if (span == 0) {
                items_[i] = part;
            } else {
                items_.push_back(part);
            }
        }
    }
    std::stable_sort(items_.begin(), items_.end(),
                     [](const AttentionItem& a, const AttentionItem& b) { return a.cost > b.cost; });

    AttentionScratch::at(nullptr, shape, &scratch_floats_);
    const int64_t scratch_bytes = scratch_bytes_of(scratch_floats_, threads);
    if (scratch_.bytes() < scratch_bytes) {
        scratch_ = HostBuffer(scratch_bytes);
    }
    const int64_t partial_bytes = partial_floats * static_cast<int64_t>(sizeof(float));
    if (partials_.bytes() < partial_bytes) {
        partials_ = HostBuffer(2 * partial_bytes);
    }
}

}  // namespace tessera

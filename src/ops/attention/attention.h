// attention: causal grouped-query attention over paged K and V, for prefill chunks and decode rows alike.
//
// A query's result is the same bits whatever the batch, the chunking, the thread count and the instruction
// set:
//   scores   q * scale, then for each (query, key) two chains of fused multiply-adds, over the even and over
//            the odd elements of the head, and their sum
//   tiles    the 64 slots of a page, in order, with online softmax: the running maximum, sum and output are
//            rescaled once a tile, the sums run over the slots in order
//   spans    every 16 tiles (1,024 slots) the state starts anew, and the spans' states are merged in order;
//            so a long sequence may be split over threads at these places without changing a bit
// A slot that a query may not see counts for nothing, whatever lies there.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "base/dtype.h"
#include "base/status.h"
#include "device/host_buffer.h"
#include "ops/common/fetch_ahead.h"
#include "ops/op_context.h"

namespace tessera {

inline constexpr int32_t kAttentionTile = 64;       // slots of a page
inline constexpr int32_t kAttentionSpanTiles = 16;  // tiles between two merges

// The queries of one sequence in the batch. Query i of it (batch row first + i) has position p = position + i
// and attends the slots [first_slot, first_slot + p]; slot s lies in page s / 64 at place s % 64.
struct AttentionSequence {
    int32_t first = 0;     // batch row of its first query
    int32_t q_len = 0;     // >= 1
    int32_t position = 0;  // of its first query
    int32_t first_slot =
        0;  // 0; 1 for the MTP layer, where position p is stored in slot p + 1 and slot 0 is empty
    std::span<const int32_t> pages;  // page ids; cover slot first_slot + position + q_len - 1
};

// One unit of work: the queries [query, query + queries) of a sequence for one KV head and the group of query
// heads that use it, over all spans (span < 0) or over one of them.
struct AttentionItem {
    int32_t sequence = 0;
    int32_t kv_head = 0;
    int32_t query = 0;
    int32_t queries = 0;
    int32_t span = -1;
    int64_t partial = 0;  // split items: index of the first row of its partial result
    int64_t cost = 0;     // query-slot pairs
};

struct AttentionShape {
    int64_t q_heads = 0;
    int64_t kv_heads = 0;  // divides q_heads
    int64_t head_dim = 0;  // a multiple of 16
};

// How a batch is cut into items, and the memory they need. Built once a step and used by every layer of it.
// The memory only grows, so a steady state allocates nothing. One owner; not shared by concurrent calls.
class AttentionPlan {
  public:
    // Takes the threads' memory ahead of the first build(), which would take it without a Status.
    Status reserve(const AttentionShape& shape, int threads);
    // Longest items first. `sequences` must stay as they are while the plan is used.
    void build(const AttentionShape& shape, std::span<const AttentionSequence> sequences, int threads);

    const AttentionShape& shape() const { return shape_; }
    std::span<const AttentionSequence> sequences() const { return sequences_; }
    std::span<const AttentionItem> items() const { return items_; }
    // The split groups: consecutive partials to be merged into one result (see attention.cc).
    std::span<const AttentionItem> merges() const { return merges_; }
    float* scratch(int thread) const { return scratch_.as<float>() + thread * scratch_floats_; }
    float* partials() const { return partials_.as<float>(); }

  private:
    AttentionShape shape_;
    std::span<const AttentionSequence> sequences_;
    std::vector<AttentionItem> items_;
    std::vector<AttentionItem> merges_;
    HostBuffer scratch_;
    HostBuffer partials_;
    int64_t scratch_floats_ = 0;  // of one thread
};

struct AttentionArgs {
    const AttentionPlan* plan = nullptr;
    const float* q = nullptr;  // [tokens, q_heads * head_dim], after qkv_post
    int64_t q_stride = 0;      // elements between two tokens
    float* out = nullptr;      // [tokens, q_heads * head_dim]
    int64_t out_stride = 0;
    const std::byte* pool = nullptr;  // page p begins at pool + p * page_stride
    int64_t page_stride = 0;          // bytes
    // Bytes from a page's begin to this layer's blocks: K and V are each [kv_heads][64][head_dim] of
    // kv_dtype.
    int64_t k_offset = 0;
    int64_t v_offset = 0;
    DType kv_dtype = DType::kFloat32;  // kFloat32 or kBFloat16
    float scale = 0;                   // 1 / sqrt(head_dim)
};

void attention(OpContext& context, const AttentionArgs& args);
// The keys that each thread will read first, where decode waits for memory; whole tiles alone.
void attention_keys_ahead(const OpContext& context, const AttentionArgs& args, FetchAhead& ahead);
// The plain reference: the same tiles, spans and chains, hence the same bits, one element at a time.
void attention_ref(const AttentionArgs& args);

}  // namespace tessera
